"""A disk that is full, failing or read-only: one line, and what was saved goes on."""

import errno
import os
import time
from pathlib import Path

import pytest

from tests.faults.test_watchdog import run_hung
from tfbig import train
from tfbig.checkpoint import list_checkpoints
from tfbig.checkpoint_reader import CheckpointReader
from tfbig.loop import Loop
from tfbig.run_folder import read_events, read_metrics

PATIENCE = 90.0  # seconds in which a fault has its outcome
FAULTS = {
    # name: (file, error, how many writes of it succeed, exit code, words)
    "full: metrics": ("metrics.jsonl", errno.ENOSPC, 2, 1, "metrics.jsonl: No space left"),
    "full: events": ("events.jsonl", errno.ENOSPC, 2, 1, "events.jsonl: No space left"),
    "full: config": ("config.json.tmp", errno.EDQUOT, 0, 1, "config.json: Disk quota exceeded"),
    "full: tokenizer": ("tokenizer.json.tmp", errno.ENOSPC, 0, 1, "tokenizer.json: No space left"),
    "broken: checkpoint": ("part-0000", errno.EIO, 99, 1, "step 4 not saved: [Errno 5] Input/outp"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_one_line_and_the_same_command_goes_on(name, tmp_path, small_flags, monkeypatch, capsys):
    file, number, num_good, code, words = FAULTS[name]
    real, folder = os.write, tmp_path / "run"
    writes, failed = 0, 0.0

    def write(descriptor, data):
        nonlocal writes, failed
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if file in path and str(folder) in path:
            writes += 1
            if writes > num_good or "step_00000004" in path:
                failed = failed or time.monotonic()
                raise OSError(number, os.strerror(number))
        return real(descriptor, data)

    flags = [*small_flags, f"--run_dir={folder}", "--eval_every=0", "--checkpoint_every=2"]
    monkeypatch.setattr(os, "write", write)
    with pytest.raises(SystemExit) as stop:
        train.main([*flags, "--steps=6", "--notensorboard"])
    monkeypatch.undo()
    assert stop.value.code == code and time.monotonic() - failed < PATIENCE
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and words in error, error
    saved = list_checkpoints(folder / "checkpoints")
    for info in saved:
        CheckpointReader(info.path).verify()
    if name == "broken: checkpoint":
        assert [info.step for info in saved] == [2]
        assert train._body([*flags, "--steps=6", "--notensorboard"]) == 0


@pytest.mark.parametrize("flags", [[], ["--restart"]])
def test_a_read_only_run_folder_is_refused(flags, tmp_path, small_flags, monkeypatch, capsys):
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    real = os.open

    def read_only(path, mode, *rest, **options):
        if str(folder) in os.fspath(path) and mode & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return real(path, mode, *rest, **options)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(SystemExit) as stop:
        train.main([*small_flags, f"--run_dir={folder}", "--steps=1", *flags])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "Read-only file system" in error


def test_what_says_who_and_where_a_run_is_may_fail(tmp_path, small_flags, monkeypatch):
    """The lock holds without its text, the watchdog goes on without its heartbeat."""
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)  # a run's folder: it was begun
    (folder / "heartbeats").mkdir()
    (folder / "heartbeats" / "rank-00000.tmp").symlink_to("/dev/full")
    real, refused = os.write, []

    def write(descriptor, data):
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(folder / "run.lock"):
            refused.append(bytes(data))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    flags = [*small_flags, f"--run_dir={folder}", "--eval_every=0", "--notensorboard"]
    assert train._body([*flags, "--steps=4"]) == 0
    assert len(refused) == 1 and b"pid" in refused[0]
    assert not (folder / "heartbeats" / "rank-00000.json").exists()
    assert [info.step for info in list_checkpoints(folder / "checkpoints")] == [4]


def test_a_hang_report_that_finds_no_room_goes_to_standard_error(tmp_path):
    for name in ("hang-rank-00000.txt", "events.jsonl"):
        (tmp_path / name).symlink_to("/dev/full")
    done = run_hung(tmp_path, "time.sleep(50)")
    assert done.returncode == 1
    assert "rank 0 of 1 made no progress" in done.stderr
    assert "in wait_for_a_peer_that_never_comes" in done.stderr


@pytest.fixture
def full_from_step_4(monkeypatch):
    """Returns a function: files that are open in a folder at step 4 are full from then on.

    The kernel itself refuses: their descriptors lead to /dev/full.
    """

    def fill(folder: Path) -> list[str]:
        real, filled = Loop._launch, []

        def launch(loop, progress):
            if progress.step == 4 and not filled:
                full = os.open("/dev/full", os.O_RDWR | os.O_CLOEXEC)
                for descriptor in os.listdir("/proc/self/fd"):
                    link = Path("/proc/self/fd", descriptor)
                    if link.exists() and folder in link.resolve().parents:
                        filled.append(link.resolve().name)
                        os.dup2(full, int(descriptor), inheritable=False)
                os.close(full)
            return real(loop, progress)

        monkeypatch.setattr(Loop, "_launch", launch)
        return filled

    return fill


def test_a_profiler_without_room_ends_its_own_work_only(
    tmp_path, small_flags, full_from_step_4, monkeypatch, capsys
):
    filled = full_from_step_4(tmp_path / "profiler-output")
    for name in ("checkpoints", "profiler-output/tensors"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "profiler-output/tensors/rank-00000.jsonl").symlink_to("/dev/full")
    flags = [*small_flags, f"--run_dir={tmp_path}", "--eval_every=0", "--notensorboard"]
    # Slow enough that the host is sampled after step 4.
    flags += ["--steps=40", "--profile_interval_ms=100", "--tensor_stats_every=10"]
    real = Loop._launch
    monkeypatch.setattr(Loop, "_launch", lambda *arguments: time.sleep(0.01) or real(*arguments))
    assert train._body(flags) == 0
    assert "rank-00000.bin" in filled and len(filled) >= 3  # events and samples, too
    error = capsys.readouterr().err
    assert "this rank's steps are noted no longer: " in error and "No space left" in error
    assert "is sampled no longer: " in error and error.count("no more tensors are looked at") == 1
    assert [record["step"] for record in read_metrics(tmp_path)] == list(range(1, 41))
    assert read_events(tmp_path)[-1]["event"] == "stop"


def test_tensorboard_without_room_is_one_line(tmp_path, small_flags, full_from_step_4, capsys):
    """Its files are written by TensorFlow, whose error is none of Python's."""
    filled = full_from_step_4(tmp_path / "tensorboard")
    flags = [*small_flags, f"--run_dir={tmp_path}", "--eval_every=0", "--checkpoint_every=3"]
    start = time.monotonic()
    with pytest.raises(SystemExit) as stop:
        train.main([*flags, "--steps=300"])
    assert stop.value.code == 1 and time.monotonic() - start < PATIENCE
    assert filled and all("tfevents" in name for name in filled)
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "No space left on device" in error, error
    assert any(name in error for name in filled)
    for info in list_checkpoints(tmp_path / "checkpoints"):
        CheckpointReader(info.path).verify()
    assert train._body([*flags, "--steps=6", "--notensorboard"]) == 0
