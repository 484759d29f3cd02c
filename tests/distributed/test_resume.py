"""A run whose processes were killed resumes with bit-equal losses, under horovodrun."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.launch import REPOSITORY, environment, horovodrun
from tfbig import train
from tfbig.checkpoint import list_checkpoints
from tfbig.errors import UserError
from tfbig.run_folder import read_events, read_metrics

STEPS, KILL_AFTER = 9, 5


def flags_of(folder: Path, small_flags: list[str]) -> list[str]:
    return [
        "-m",
        "tfbig.train",
        "--strategy=horovod",
        *small_flags,
        f"--run_dir={folder}",
        f"--steps={STEPS}",
        "--deterministic",
        "--checkpoint_every=2",
        "--eval_every=0",
        "--scale_learning_rate",
    ]


def kill_rank_1_after(step: int, folder: Path, arguments: list[str]) -> None:
    """Starts the run and sends SIGKILL to the second process once `step` is on record."""
    command = [str(Path(sys.executable).with_name("horovodrun")), "-np", "2", sys.executable]
    process = subprocess.Popen(
        [*command, *arguments],
        cwd=REPOSITORY,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 240
        metrics = folder / "metrics.jsonl"
        while not metrics.exists() or metrics.read_text().count("\n") < step:
            assert process.poll() is None, "the run ended before it was killed"
            assert time.monotonic() < deadline, "the run did not get far enough"
            time.sleep(0.01)
        os.kill(pid_of_rank(1, folder), signal.SIGKILL)
        assert process.wait(timeout=120) != 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def pid_of_rank(rank: int, folder: Path) -> int:
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            try:
                words = (directory / "cmdline").read_bytes().split(b"\0")
                variables = (directory / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            is_ours = f"--run_dir={folder}".encode() in words and words[0].endswith(b"python")
            if is_ours and f"HOROVOD_RANK={rank}".encode() in variables:
                return int(directory.name)
    raise AssertionError(f"no process of rank {rank}")


@pytest.mark.distributed
def test_killed_and_resumed_equals_undisturbed(tmp_path, small_flags):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    done = horovodrun(2, flags_of(straight, small_flags), timeout=240)
    assert done.returncode == 0, done.stdout
    kill_rank_1_after(KILL_AFTER, killed, flags_of(killed, small_flags))
    found = list_checkpoints(killed / "checkpoints")
    assert found and found[-1].step < STEPS, "the run was killed in the middle"
    done = horovodrun(2, flags_of(killed, small_flags), timeout=240)
    assert done.returncode == 0, done.stdout
    starts = [event["step"] for event in read_events(killed) if event["event"] == "start"]
    assert len(starts) == 2 and starts[1] >= KILL_AFTER - 2
    expected, found_again = read_metrics(straight), read_metrics(killed)
    assert [r["step"] for r in found_again] == list(range(1, STEPS + 1))
    for name in ("loss", "grad_norm", "consumed_samples"):
        assert [r[name] for r in found_again] == [r[name] for r in expected], name
    # The rate counts for two replicas.
    with pytest.raises(UserError, match=r"num_replicas: the checkpoint has 2, this run 1\."):
        train._body([*flags_of(killed, small_flags)[2:], "--steps=10"])
    # Lines that belong to one rank reach the screen once.
    assert done.stdout.count("finished") == 1
    assert "port.cc" not in done.stdout and "Traceback" not in done.stdout
