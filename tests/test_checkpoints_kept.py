import json

import pytest

from tests.saved_checkpoints import matrix, part, save, save_many, steps, whole
from tfbig.checkpoint import (
    compare_for_resume,
    flatten_fields,
    free_disk_error,
    latest,
    list_checkpoints,
    newest_that_verifies,
    prune,
    remove_leftovers,
)
from tfbig.checkpoint_format import (
    CheckpointError,
    RunState,
    UnreadableCheckpointError,
)
from tfbig.checkpoint_reader import CheckpointReader
from tfbig.checkpoint_writer import CheckpointWriter
from tfbig.rectangle import Rectangle


@pytest.mark.parametrize("position", [0, 9, 100, -1])
def test_a_flipped_bit_is_found_and_an_earlier_checkpoint_chosen(tmp_path, position):
    for step in (1, 2):
        save(tmp_path, step, [whole("x", matrix(step))])
    file = tmp_path / "step_00000002" / "part-00000.safetensors"
    contents = bytearray(file.read_bytes())
    contents[position] ^= 1
    file.write_bytes(contents)
    with pytest.raises(UnreadableCheckpointError, match=r"part-00000.safetensors is damaged"):
        CheckpointReader(file.parent).verify()
    found, rejected = newest_that_verifies(tmp_path)
    assert found.step == 1
    assert [(info.step, "its sha256 is not" in reason) for info, reason in rejected] == [(2, True)]


def test_truncated_and_missing_files_and_manifests_are_found(tmp_path):
    for step in range(1, 6):
        save(tmp_path, step, [whole("x", matrix(step))])
    parts = {step: tmp_path / f"step_0000000{step}" / "part-00000.safetensors" for step in (3, 4)}
    parts[3].write_bytes(parts[3].read_bytes()[:-1])
    parts[4].unlink()
    (tmp_path / "step_00000002" / "manifest.json").write_text(
        '{"format_version": 99, "variables": {}}'
    )
    (tmp_path / "step_00000005" / "manifest.json").write_text(
        '{"format_version": 1, "variables": {}}'
    )
    with pytest.raises(UnreadableCheckpointError, match="ends before the last byte of x"):
        CheckpointReader(parts[3].parent).read("x")
    found, rejected = newest_that_verifies(tmp_path)
    assert found.step == 1
    reasons = {info.step: reason for info, reason in rejected}
    assert "is damaged: no step, files;" in reasons[5]
    assert "part-00000.safetensors cannot be read: No such file" in reasons[4]
    assert "bytes, its manifest says" in reasons[3]
    assert "has format_version 99, this tfbig reads 1" in reasons[2]
    assert newest_that_verifies(tmp_path / "absent") == (None, [])


def test_reading_what_is_not_there_says_what_is(tmp_path):
    reader = CheckpointReader(save(tmp_path, 1, [whole("dense/kernel", matrix())]))
    assert reader.has("dense/kernel") and not reader.has("dense/kernels")
    with pytest.raises(UnreadableCheckpointError, match=r"Did you mean dense/kernel\?"):
        reader.read("dense/kernels")
    with pytest.raises(ValueError, match=r"dense/kernel: \[0:5, 0:6\] is not within shape"):
        reader.read("dense/kernel", (0, 0), (5, 6))
    with pytest.raises(UnreadableCheckpointError, match="not a complete checkpoint"):
        CheckpointReader(tmp_path)


def test_a_manifest_that_lost_a_slice_does_not_give_uninitialised_memory(tmp_path):
    path = save(tmp_path, 1, [whole("x", matrix())])
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["variables"]["x"]["slices"] = []
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UnreadableCheckpointError, match="has 0 of the 24 elements"):
        CheckpointReader(path).read("x")


def test_only_complete_checkpoints_are_listed_and_leftovers_can_go(tmp_path):
    assert list_checkpoints(tmp_path / "absent") == []
    assert latest(tmp_path) is None
    for step in (20, 100000000, 3):
        save(tmp_path, step, [whole("x", matrix())])
    CheckpointWriter(tmp_path, 1, 2).save(7, [whole("x", matrix())], RunState(), "crashed")
    for name in ("step_9", "other", "step_00000040", "step_00000041"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_00000041" / "notes.txt").write_text("the user's")
    (tmp_path / "step_00000050").write_text("a file")
    assert [info.step for info in list_checkpoints(tmp_path)] == [3, 20, 100000000]
    assert latest(tmp_path).path == tmp_path / "step_100000000"
    assert latest(tmp_path).manifest["step"] == 100000000
    removed = remove_leftovers(tmp_path)
    assert sorted(path.name for path in removed) == ["step_00000007", "step_00000040"]
    assert (tmp_path / "step_00000041" / "notes.txt").exists()
    assert len(list_checkpoints(tmp_path)) == 3


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({"keep_last": 1}, [60]),
        ({"keep_last": 2}, [50, 60]),
        ({"keep_last": 9}, [10, 20, 30, 40, 50, 60]),
        ({"keep_last": 1, "keep_every": 30}, [30, 60]),
        ({"keep_last": 1, "keep_best": 1}, [20, 60]),
        ({"keep_last": 1, "keep_best": 2}, [20, 40, 60]),
        ({"keep_last": 1, "protect": [10]}, [10, 60]),
    ],
)
def test_pruning_keeps_what_its_rules_say(tmp_path, rules, kept):
    save_many(tmp_path)
    deleted = prune(tmp_path, **rules)
    assert steps(tmp_path) == kept
    assert len(deleted) == 6 - len(kept)
    assert not any(path.exists() for path in deleted)


def test_nothing_is_pruned_before_the_newest_reads_back(tmp_path):
    save_many(tmp_path)
    file = tmp_path / "step_00000060" / "part-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UnreadableCheckpointError, match="step_00000060 is damaged"):
        prune(tmp_path, keep_last=1)
    assert steps(tmp_path) == [10, 20, 30, 40, 50, 60]


def test_a_failed_save_leaves_nothing_after_the_next_one(tmp_path):
    writer = CheckpointWriter(tmp_path)
    with pytest.raises(CheckpointError):
        writer.save(1, [part("x", matrix(), Rectangle((0, 0), (4, 5)))], RunState())
    assert (tmp_path / "step_00000001").exists()
    writer.save(2, [whole("x", matrix())], RunState())
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]


def test_no_room_is_said_with_the_numbers(tmp_path):
    assert free_disk_error(tmp_path / "not" / "yet", 1, margin_bytes=0) is None
    error = free_disk_error(tmp_path, 2**60)
    assert "needs 1073741824.00 GiB and a margin of 0.25 GiB" in error and "\n" not in error


def test_resume_is_compared_field_by_field():
    saved = {
        "model": {"num_layers": 2, "dims": (1, 2), "dropout": 0.1, "old": 1},
        "run": {"steps": 10},
        "parallel": {"strategy": "single"},
        "rules": {},
    }
    current = {
        "model": {"num_layers": 3, "dims": [1, 2], "dropout": 0.1, "new": "a"},
        "run": {"steps": 20},
        "parallel": {"strategy": "horovod"},
        "rules": {},
    }
    lines = compare_for_resume(
        flatten_fields(saved), flatten_fields(current), {"run.steps", "parallel.*"}
    )
    assert lines == [
        "model.num_layers: the checkpoint has 2, this run 3",
        "model.old: the checkpoint has 1, this run no such field",
        'model.new: the checkpoint has no such field, this run "a"',
    ]
    assert compare_for_resume(flatten_fields(saved), flatten_fields(saved), ()) == []
