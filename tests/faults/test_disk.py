"""A disk that is full, failing or read-only: one line, and what was saved goes on."""

import errno
import os

import pytest

from tfbig import train
from tfbig.checkpoint import list_checkpoints
from tfbig.checkpoint_reader import CheckpointReader

FAULTS = {
    # name: (file, error, how many writes of it succeed, exit code, words)
    "full: metrics": ("metrics.jsonl", errno.ENOSPC, 2, 1, "metrics.jsonl: No space left"),
    "full: events": ("events.jsonl", errno.ENOSPC, 2, 1, "events.jsonl: No space left"),
    "full: config": ("config.json.tmp", errno.EDQUOT, 0, 1, "Disk quota exceeded"),
    "broken: checkpoint": ("part-0000", errno.EIO, 99, 1, "step 4 not saved: [Errno 5] Input/outp"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_one_line_and_the_same_command_goes_on(name, tmp_path, small_flags, monkeypatch, capsys):
    file, number, num_good, code, words = FAULTS[name]
    real, folder = os.write, tmp_path / "run"
    writes = 0

    def write(descriptor, data):
        nonlocal writes
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if file in path and str(folder) in path:
            writes += 1
            if writes > num_good or "step_00000004" in path:
                raise OSError(number, os.strerror(number))
        return real(descriptor, data)

    flags = [*small_flags, f"--run_dir={folder}", "--eval_every=0", "--checkpoint_every=2"]
    monkeypatch.setattr(os, "write", write)
    with pytest.raises(SystemExit) as stop:
        train.main([*flags, "--steps=6", "--notensorboard"])
    monkeypatch.undo()
    assert stop.value.code == code
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
