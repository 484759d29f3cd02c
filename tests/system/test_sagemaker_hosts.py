"""A job of SageMaker's on two hosts: each with its own /opt/ml, one network, one shared channel."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.launch import REPOSITORY
from tests.launching.test_sagemaker import make_root
from tests.system.on_hosts import on_host
from tfbig.checkpoint import latest

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not os.environ.get("TFBIG_SYSTEM_TESTS"), reason="make test-system runs it"),
    pytest.mark.usefixtures("healed"),
]
HOSTS = ("h1", "h2")


class Job:
    """The containers of a job, of which each sees its own root at the same path.

    Args:
      folder: for everything.
      given: hyperparameters.
      data: the folder of prepared data, by host.
      is_shared: whether both have the channel `run`.
    """

    def __init__(self, folder, given, data, is_shared):
        self.shared = folder / "shared"  # a file system that both have mounted
        self._mount = folder / "ml"
        self._processes = {}
        for path in (self.shared, self._mount):
            path.mkdir()
        self.roots = {}
        for host in HOSTS:
            root = make_root(folder / f"ml_{host}", given, ["training"], HOSTS, host)
            self.roots[host] = root
            (root / "input/data/training").rmdir()
            (root / "input/data/training").symlink_to(data[host])
            if is_shared:
                (root / "input/data/run").symlink_to(self.shared)

    def give(self, **changes):
        """Changes hyperparameters, for the next start."""
        for root in self.roots.values():
            file = root / "input/config/hyperparameters.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    def start(self, *flags):
        """Starts both containers, as processes that we know by the files pid."""
        launch = [sys.executable, "-m", "tfbig.launch", "--cluster=sagemaker", "--restarts=0"]
        launch = shlex.join([*launch, f"--sagemaker_root={self._mount}", *flags])
        for host, root in self.roots.items():
            inside = f"mount --bind {root} {self._mount} && echo $$ > {root}/pid && exec {launch}"
            self._processes[host] = subprocess.Popen(
                on_host(host, ["unshare", "-m", "sh", "-c", inside]),
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def stop(self):
        """Sends SIGTERM to the launcher of each host, as SageMaker does."""
        for root in self.roots.values():
            os.kill(int((root / "pid").read_text()), signal.SIGTERM)

    def wait_for_checkpoint(self, seconds=300):
        deadline = time.monotonic() + seconds
        while self.newest() is None:
            ended = any(process.poll() is not None for process in self._processes.values())
            assert not ended and time.monotonic() < deadline, self.end(1)
            time.sleep(0.2)

    def newest(self):
        return latest(self.shared / "run/checkpoints")

    def end(self, timeout=300):
        """Returns the exit code and what was printed, by host."""
        outputs = {}
        for host, process in self._processes.items():
            try:
                output = process.communicate(timeout=timeout)[0]
            except subprocess.TimeoutExpired:
                os.kill(int((self.roots[host] / "pid").read_text()), signal.SIGKILL)
                output = process.communicate()[0]
            outputs[host] = (process.returncode, output)
        return outputs

    def failure(self, host) -> str:
        path = self.roots[host] / "output/failure"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def given(small_flags):
    flags = dict(flag[2:].split("=", 1) for flag in small_flags)
    flags.pop("data")
    flags |= {"steps": "100000", "checkpoint_every": "5", "eval_every": "0"}
    return flags | {"tensorboard": "false", "processes_per_host": "1"}


def test_two_hosts_stop_go_on_and_the_first_one_has_the_model(tmp_path, given, small_data):
    job = Job(tmp_path, given, dict.fromkeys(HOSTS, Path(small_data)), is_shared=True)
    job.start()
    job.wait_for_checkpoint()
    job.stop()
    outputs = job.end()
    assert [code for code, _ in outputs.values()] == [143, 143], outputs
    saved = job.newest().step
    assert latest(job.roots["h1"] / "model/checkpoints").step == saved
    job.give(steps=str(saved + 3))
    job.start()
    outputs = job.end()
    assert [code for code, _ in outputs.values()] == [0, 0], outputs
    assert "going on from its checkpoint" in outputs["h1"][1] and "network card eth0" in str(
        outputs
    )
    assert job.newest().step == saved + 3
    assert latest(job.roots["h1"] / "model/checkpoints").step == saved + 3
    assert (job.roots["h1"] / "output/data/metrics.jsonl").stat().st_size > 0
    assert not (job.roots["h2"] / "model").exists()
    assert not (job.roots["h2"] / "output/data").exists()
    assert not any(job.failure(host) for host in HOSTS)


def test_two_hosts_without_a_shared_channel_are_refused(tmp_path, given, small_data):
    job = Job(tmp_path, given, dict.fromkeys(HOSTS, Path(small_data)), is_shared=False)
    job.start()
    outputs = job.end()
    assert [code for code, _ in outputs.values()] == [2, 2], outputs
    assert "must be on a file system that all hosts share" in job.failure("h1"), outputs
    assert job.failure("h2").endswith("it printed nothing; rank 0 may have said why"), outputs
    assert not any((root / "model").exists() for root in job.roots.values())


def test_a_host_that_cannot_start_is_named_by_the_other(tmp_path, given, small_data):
    (tmp_path / "empty").mkdir()
    data = {"h1": Path(small_data), "h2": tmp_path / "empty"}
    job = Job(tmp_path, given, data, is_shared=True)
    job.start("--start_timeout=20")
    outputs = job.end()
    assert [code for code, _ in outputs.values()] == [1, 2], outputs
    assert "the launchers of h2 have not come (1 of 2)" in job.failure("h1"), outputs
    assert "holds no prepared data, and 2 hosts need the same" in job.failure("h2"), outputs
