"""Two real hosts: network namespaces with their own names, addresses and sshd; needs root."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.launch import REPOSITORY, run
from tfbig.run_folder import read_metrics

TWO_HOSTS = str(REPOSITORY / "tests/system/two_hosts")
BIN = Path(sys.executable).parent
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not os.environ.get("TFBIG_SYSTEM_TESTS"), reason="make test-system runs it"),
]
TRAIN = ["-m", "tfbig.train", "--eval_every=0", "--notensorboard", "--deterministic"]
HOROVODRUN = [str(BIN / "horovodrun"), "-np", "2", "-H", "h1:1,h2:1"]
HOROVODRUN += ["--network-interfaces", "eth0", sys.executable]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """Makes the hosts; what runs on them ends with them."""
    assert os.geteuid() == 0, "tests/system/test_two_hosts.py needs root"
    os.environ["TWO_HOSTS_DIR"] = str(tmp_path_factory.mktemp("hosts") / "two_hosts")
    subprocess.run([TWO_HOSTS, "down"], timeout=60)
    subprocess.run([TWO_HOSTS, "up"], check=True, timeout=60)
    yield
    subprocess.run([TWO_HOSTS, "down"], timeout=60)


@pytest.fixture(autouse=True)
def healed(hosts):
    yield
    subprocess.run([TWO_HOSTS, "heal", "h2"], check=True, timeout=30)


def on_host(host: str, command: list[str], **more: str) -> list[str]:
    values = {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    } | more
    return [TWO_HOSTS, "run", host, "env", *(f"{k}={v}" for k, v in values.items()), *command]


def losses(folder) -> list[float]:
    return [record["loss"] for record in read_metrics(Path(folder) / "metrics.jsonl")]


@pytest.fixture(scope="module")
def reference(tmp_path_factory, small_flags):
    """The losses of one device."""
    folder = tmp_path_factory.mktemp("single")
    command = [sys.executable, *TRAIN, *small_flags, "--strategy=single", "--steps=4"]
    done = run([*command, f"--run_dir={folder / 'run'}"], 400)
    assert done.returncode == 0, done.stdout
    return losses(folder / "run")


LAYOUTS = {
    "data": ["--strategy=horovod"],
    "p2": ["--strategy=pipeline", "--pipeline_parallel_degree=2", "--microbatches=2"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_hosts_train_as_one_does(layout, reference, tmp_path, small_flags):
    flags = [*small_flags, *LAYOUTS[layout], "--steps=4", f"--run_dir={tmp_path / 'run'}"]
    if layout == "p2":
        flags.append("--num_layers=2")
    done = run(on_host("h1", [*HOROVODRUN, *TRAIN, *flags]), 500)
    assert done.returncode == 0, done.stdout
    if layout == "p2":
        assert len(losses(tmp_path / "run")) == 4
        flags = [f for f in flags if "pipeline" not in f and "microbatches" not in f]
        flags = [*flags, "--strategy=single", f"--run_dir={tmp_path / 'single'}"]
        done = run([sys.executable, *TRAIN, *flags], 400)
        assert done.returncode == 0, done.stdout
        reference = losses(tmp_path / "single")
    assert losses(tmp_path / "run") == pytest.approx(reference, rel=1e-5)


class Running:
    """A long run on both hosts, started on h1; its terminal goes to a file."""

    def __init__(self, tmp_path, small_flags, launcher):
        self.folder, self._terminal = tmp_path / "run", tmp_path / "terminal"
        flags = [*small_flags, "--strategy=horovod", "--steps=1000000", f"--run_dir={self.folder}"]
        with open(self._terminal, "w") as file:
            self.process = subprocess.Popen(
                on_host("h1", [*launcher, *TRAIN, *flags, "--checkpoint_every=1000000"]),
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.wait_for_step(3)

    @property
    def shown(self) -> str:
        return self._terminal.read_text(errors="replace")

    def step(self) -> int:
        try:
            return read_metrics(self.folder / "metrics.jsonl")[-1]["step"]
        except (OSError, IndexError):
            return 0

    def wait_for_step(self, step, seconds=300):
        deadline = time.monotonic() + seconds
        while self.step() < step:
            assert self.process.poll() is None and time.monotonic() < deadline, self.shown
            time.sleep(0.2)

    def close(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


def test_a_short_cut_is_survived_and_a_lost_host_ends_the_job_and_is_named(tmp_path, small_flags):
    job = Running(tmp_path, small_flags, HOROVODRUN)
    try:
        subprocess.run([TWO_HOSTS, "cut", "h2"], check=True)
        time.sleep(5)
        assert job.process.poll() is None
        subprocess.run([TWO_HOSTS, "heal", "h2"], check=True)
        job.wait_for_step(job.step() + 5)
        start = time.monotonic()
        subprocess.run([TWO_HOSTS, "cut", "h2"], check=True)
        job.process.wait(90)
        print(f"the job ended {time.monotonic() - start:.0f} s after the cut")
    finally:
        job.close()
    assert job.process.returncode != 0
    last = job.shown.splitlines()[-10:]
    assert any("h2" in line for line in last), "\n".join(last)


def test_a_run_folder_that_only_one_host_sees_is_refused(tmp_path, small_flags):
    (tmp_path / "own").mkdir()
    flags = [*small_flags, "--strategy=horovod", "--steps=2", f"--run_dir={tmp_path / 'own/run'}"]
    train = shlex.join([sys.executable, *TRAIN, *flags])
    # h2 has a disk of its own there.
    hidden = f"mount -t tmpfs none {tmp_path / 'own'} && exec {train}"
    script = f"[ $(hostname) = h2 ] && exec unshare -m sh -c {shlex.quote(hidden)}; exec {train}"
    done = run(on_host("h1", [*HOROVODRUN[:-1], "bash", "-c", script]), 400)
    assert done.returncode != 0
    assert "rank 1 does not see" in done.stdout, done.stdout
    assert "--run_dir must be on a file system that all hosts share" in done.stdout
    assert not (tmp_path / "own/run").exists()


def test_the_doctor_sees_both_hosts_and_a_folder_that_one_lacks(tmp_path):
    (tmp_path / "own").mkdir()
    doctor = f"{sys.executable} -m tfbig.doctor --megabytes=2 --json --run_dir={tmp_path}/own/run"
    hidden = f"mount -t tmpfs none {tmp_path / 'own'} && exec {doctor}"
    script = f"[ $(hostname) = h2 ] && exec unshare -m sh -c {shlex.quote(hidden)}; exec {doctor}"
    done = run(on_host("h1", [*HOROVODRUN[:-1], "bash", "-c", script]), 400)
    (line,) = [line for line in done.stdout.splitlines() if '{"problems"' in line]
    found = json.loads(line[line.index("{") :])["findings"]
    assert done.returncode != 0
    shared = [f for f in found if "does not see" in f["text"]]
    assert len(shared) == 1 and shared[0]["hosts"] == ["h2"] and shared[0]["level"] == "problem"
    measured = [f["text"] for f in found if f["group"] == "bandwidth"]
    assert any(text.startswith("h1-h2: ") for text in measured), measured


def test_our_own_launcher_meets_over_the_network_without_ssh(tmp_path, small_flags):
    flags = [*small_flags, "--strategy=horovod", "--steps=3", f"--run_dir={tmp_path / 'run'}"]
    launch = [sys.executable, "-m", "tfbig.launch", "--cluster=hosts", "--hosts=h1,h2"]
    command = [*launch, "--num_processes=2", "--restarts=0", "--", sys.executable, *TRAIN, *flags]
    other = subprocess.Popen(
        on_host("h2", command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        first = run(on_host("h1", command), 400)
        second = other.communicate(timeout=60)[0]
    finally:
        other.kill()
    assert first.returncode == other.returncode == 0, first.stdout + second
    assert "h2 starts rank 1 of 2 on 2 hosts; network card eth0" in second
    assert len(losses(tmp_path / "run")) == 3
