"""Commands and long runs on the hosts of network namespaces that `two_hosts` makes."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.soak import processes_of
from tests.distributed.launch import REPOSITORY
from tfbig.run_folder import read_metrics

TWO_HOSTS = str(REPOSITORY / "tests/system/two_hosts")
BIN = Path(sys.executable).parent
TRAIN = ["-m", "tfbig.train", "--eval_every=0", "--notensorboard", "--deterministic"]
HOROVODRUN = [str(BIN / "horovodrun"), "-np", "2", "-H", "h1:1,h2:1"]
HOROVODRUN += ["--network-interfaces", "eth0", sys.executable]
LAYOUTS = {
    "data": ["--strategy=horovod"],
    "p2": ["--strategy=pipeline", "--pipeline_parallel_degree=2", "--microbatches=2"],
}


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


class Running:
    """A long run on both hosts, started on h1; its terminal goes to a file."""

    def __init__(self, tmp_path, flags, launcher):
        self.folder, self._terminal = tmp_path / "run", tmp_path / "terminal"
        flags = [*flags, "--steps=1000000", f"--run_dir={self.folder}"]
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
        for pid in processes_of(self.folder):  # an elastic one outlives its terminal
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
