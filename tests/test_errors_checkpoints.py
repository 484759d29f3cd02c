"""Damaged or foreign checkpoints, to start from and to go on from: one line, nothing made."""

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.error_line import line_of
from tfbig import checkpoint_reader, evaluate, generate, train
from tfbig.checkpoint_format import RunState, Slice, UnreadableCheckpointError
from tfbig.checkpoint_reader import CheckpointReader
from tfbig.checkpoint_writer import CheckpointWriter
from tfbig.run_folder import RunFolder

PART = "part-00000.safetensors"


def save(folder: RunFolder, step: int) -> Path:
    """Writes a checkpoint of one variable."""
    kernel = np.ones((4, 6), np.float32)
    slices = [Slice("dense/kernel", kernel.shape, (0, 0), kernel, True)]
    writer = CheckpointWriter(folder.checkpoints_dir, 0, 1, timeout_seconds=1.0)
    return Path(writer.save(step, slices, RunState(consumed_samples=6 * step), "a"))


def change_manifest(**values: object) -> Callable[[Path], None]:
    def change(checkpoint: Path) -> None:
        path = checkpoint / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def drop_variables(checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    fields = json.loads(path.read_text())
    del fields["variables"]
    path.write_text(json.dumps(fields))


DAMAGE = {
    # name: (what is done to it, words of the line)
    "no manifest": (
        lambda path: (path / "manifest.json").unlink(),
        "it has no manifest.json; name",
    ),
    "manifest cut": (lambda path: (path / "manifest.json").write_text("{"), "is damaged: not JSON"),
    "manifest is a list": (
        lambda path: (path / "manifest.json").write_text("[]"),
        "is not a checkpoint's",
    ),
    "no variables": (drop_variables, "is not a checkpoint's, but a data folder's or another"),
    "newer format": (change_manifest(format_version=99), "has format_version 99, this tfbig reads"),
    "part missing": (lambda path: (path / PART).unlink(), f"{PART} cannot be read: No such file"),
    "part cut": (
        lambda path: (path / PART).write_bytes((path / PART).read_bytes()[:-4]),
        "bytes, its manifest says",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_initial_weights(name, tmp_path, small_flags, capsys):
    damage, words = DAMAGE[name]
    checkpoint = save(RunFolder(tmp_path / "other"), 2)
    damage(checkpoint)
    folder = tmp_path / "run"
    flags = [*small_flags, f"--run_dir={folder}", f"--init_from={checkpoint}"]
    line = line_of(train.main, flags, capsys, "train")
    assert words in line and str(checkpoint) in line
    assert not folder.exists()


def test_only_the_files_that_are_read_are_checked_and_once(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    writers = [CheckpointWriter(folder.checkpoints_dir, rank, 2) for rank in (0, 1)]
    rows = [Slice("dense/kernel", (2, 6), (rank, 0), np.ones((1, 6)), True) for rank in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        saves = [
            pool.submit(writer.save, 3, [part], RunState(), "a")
            for writer, part in zip(writers, rows, strict=True)
        ]
        path = Path(saves[0].result(60))
    part = path / "part-00001.safetensors"
    part.write_bytes((data := part.read_bytes())[:-1] + bytes([data[-1] ^ 1]))
    looked, real = [], checkpoint_reader.digest_problem
    monkeypatch.setattr(
        checkpoint_reader, "digest_problem", lambda *a: looked.append(a[0].name) or real(*a)
    )
    reader = CheckpointReader(path, checks_digests=True)
    for _ in range(2):
        np.testing.assert_array_equal(reader.read("dense/kernel", (0, 0), (1, 6)), np.ones((1, 6)))
    assert looked == [PART]
    with pytest.raises(UnreadableCheckpointError, match=rf"{part.name} is damaged: its sha256"):
        reader.read("dense/kernel")


def test_initial_weights_of_a_data_folder_or_a_run(tmp_path, small_data, small_flags, capsys):
    checkpoint = save(RunFolder(tmp_path / "other"), 2)
    for path, words in (
        (small_data, "is not a checkpoint's, but a data folder's"),
        (
            tmp_path / "other",
            f"is a run's folder: name one of its checkpoints, such as {checkpoint}",
        ),
        (tmp_path, "it has no manifest.json; name a run's checkpoints/step_NNNNNNNN"),
        (checkpoint / PART, "is a file: name the folder that holds the weights"),
    ):
        flags = [*small_flags, f"--run_dir={tmp_path / 'run'}", f"--init_from={path}"]
        assert words in line_of(train.main, flags, capsys, "train")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["part missing", "part cut", "newer format"])
def test_a_run_none_of_whose_checkpoints_is_intact(name, tmp_path, small_flags, capsys):
    damage, _ = DAMAGE[name]
    folder = RunFolder(tmp_path / "run")
    checkpoint = save(folder, 2)
    damage(checkpoint)
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    line = line_of(train.main, [*small_flags, f"--run_dir={folder.path}"], capsys, "train")
    assert "no checkpoint is intact: step 2 is damaged" in line
    assert "Use --restart to start anew" in line
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == before


def test_readers_of_a_run_without_its_checkpoint(tmp_path, capsys):
    folder = RunFolder(tmp_path / "run")
    checkpoint = save(folder, 2)
    folder.write_config({}, [])
    shutil.rmtree(checkpoint)
    for main, command in ((evaluate.main, "evaluate"), (generate.main, "generate")):
        line = line_of(main, [f"--run={folder.path}"], capsys, command)
        assert "has no complete checkpoint yet: train it further" in line


def test_no_room_is_not_said_where_there_is_no_disk(small_flags, capsys):
    line = line_of(train.main, [*small_flags, "--run_dir=/proc/run"], capsys, "train")
    assert "cannot make the run's folder /proc/run" in line and "no room" not in line
