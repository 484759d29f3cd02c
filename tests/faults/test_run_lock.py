"""Two jobs in one run folder: the second is refused until the first one's process is gone."""

import errno
import fcntl
import os
import subprocess
import sys

import pytest

from tests.distributed.launch import environment
from tfbig import train
from tfbig.errors import UserError
from tfbig.run_lock import LOCK_NAME, RunLock

HOLDER = """
import sys, time
from tfbig.run_lock import RunLock
lock = RunLock(sys.argv[1])
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of the folder `run`."""
    folder = tmp_path / "run"
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], env=environment(), stdout=subprocess.PIPE
    )
    try:
        assert process.stdout.readline() == b"held\n"
        yield process
    finally:
        process.kill()
        process.wait(timeout=30)
        process.stdout.close()


def contents(folder) -> dict:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_kill_9_sets_the_lock_free(holder, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(UserError, match=rf"host .*, pid {holder.pid}, since 20..-.* UTC"):
        RunLock(folder)
    holder.kill()
    holder.wait(timeout=30)
    with RunLock(folder) as lock:
        assert not lock.note
        assert str(os.getpid()).encode() in (folder / LOCK_NAME).read_bytes()
        with pytest.raises(UserError, match=f"pid {os.getpid()}"):
            RunLock(folder)
    assert (folder / LOCK_NAME).read_bytes() == b""
    RunLock(folder).release()


@pytest.mark.parametrize("flags", [[], ["--restart"]])
def test_a_second_job_is_told_in_one_line_and_touches_nothing(
    flags, holder, tmp_path, small_flags, capsys
):
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir()
    before = contents(tmp_path)
    with pytest.raises(SystemExit) as stop:
        train.main([*small_flags, f"--run_dir={folder}", "--steps=1", *flags])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"pid {holder.pid}" in error
    assert contents(tmp_path) == before


def test_a_folder_renamed_while_its_lock_was_sought_is_left_alone(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    real, renamed = fcntl.flock, []

    def flock(descriptor, operation):
        real(descriptor, operation)
        if not renamed:
            renamed.append(folder.rename(tmp_path / "run.1"))
            folder.mkdir()

    monkeypatch.setattr(fcntl, "flock", flock)
    with RunLock(folder), pytest.raises(UserError):
        RunLock(folder)
    RunLock(tmp_path / "run.1").release()


def test_without_locks_a_run_goes_on_with_a_note(tmp_path, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with RunLock(tmp_path) as lock:
        assert "knows no locks (No locks available)" in lock.note
