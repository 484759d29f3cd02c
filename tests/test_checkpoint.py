import json
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.saved_checkpoints import matrix, part, save, steps, whole
from tfbig.checkpoint import (
    latest,
    list_checkpoints,
)
from tfbig.checkpoint_format import (
    CheckpointError,
    LazyArray,
    RunState,
    Slice,
    UnreadableCheckpointError,
    num_bytes_to_write,
)
from tfbig.checkpoint_reader import CheckpointReader
from tfbig.checkpoint_writer import CheckpointWriter
from tfbig.rectangle import Rectangle


def test_what_is_saved_is_read_with_its_dtype(tmp_path):
    arrays = {
        "a/kernel": matrix(),
        "iterations": np.array(2**40, np.int64),
        "half": np.arange(5).astype(ml_dtypes.bfloat16),
        "flag": np.array([True, False]),
        "nothing": np.zeros((0, 3), np.float32),
    }
    run_state = RunState(
        consumed_samples=64,
        seeds={"model": 1},
        loss_scale=2.0**15,
        config={"model": {"num_layers": 2}},
        tokenizer_sha256="ab",
        data={"manifest_sha256": "cd"},
        metadata={"eval_loss": np.float32(2.5)},
    )
    slices = [whole(name, array) for name, array in arrays.items()]
    path = CheckpointWriter(tmp_path / "run" / "checkpoints").save(1000, slices, run_state)
    assert path == tmp_path / "run" / "checkpoints" / "step_00001000"
    assert sorted(entry.name for entry in path.iterdir()) == [
        "manifest.json",
        "part-00000.safetensors",
    ]
    reader = CheckpointReader(path)
    reader.verify()
    assert reader.paths() == sorted(arrays)
    for name, array in arrays.items():
        assert reader.read(name).dtype == reader.dtype(name) == array.dtype
        assert reader.shape(name) == array.shape
        np.testing.assert_array_equal(reader.read(name), array)
    expected = {
        "format_version": 1,
        "step": 1000,
        "consumed_samples": 64,
        "seeds": {"model": 1},
        "loss_scale": 32768.0,
        "config": {"model": {"num_layers": 2}},
        "tokenizer_sha256": "ab",
        "data": {"manifest_sha256": "cd"},
        "metadata": {"eval_loss": 2.5},
        "num_ranks": 1,
    }
    assert expected.items() <= reader.manifest.items()
    assert json.loads((path / "manifest.json").read_text()) == reader.manifest


def test_a_number_a_lazy_array_and_a_replica_may_be_slices(tmp_path):
    def refuse():
        raise AssertionError("the array of a replica was loaded")

    array = matrix()
    slices = [
        Slice("scale", (), (), 3.5, True),
        Slice("kernel", (4, 6), (0, 0), LazyArray((4, 6), "float32", lambda: array), True),
        Slice("kernel", (4, 6), (0, 0), LazyArray((4, 6), "float32", refuse), False),
    ]
    assert num_bytes_to_write(slices) == 8 + 4 * 6 * 4
    reader = CheckpointReader(save(tmp_path, 0, slices))
    assert reader.read("scale") == 3.5
    np.testing.assert_array_equal(reader.read("kernel"), array)


@st.composite
def tilings(draw):
    """A shape, a tiling of it by cutting at random, the rank of each tile, and a rectangle."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=0, max_size=4)))
    tiles = [Rectangle((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 8)) if shape else 0):
        tile = tiles.pop(draw(st.integers(0, len(tiles) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, tile.shape[dim]))
        for begin, extent in ((0, cut), (cut, tile.shape[dim] - cut)):
            start, size = list(tile.start), list(tile.shape)
            start[dim] += begin
            size[dim] = extent
            tiles.append(Rectangle(tuple(start), tuple(size)))
    num_ranks = draw(st.integers(1, 4))
    ranks = [draw(st.integers(0, num_ranks - 1)) for _ in tiles]
    start = tuple(draw(st.integers(0, size - 1)) for size in shape)
    extent = tuple(
        draw(st.integers(0, size - first)) for size, first in zip(shape, start, strict=True)
    )
    return shape, tiles, num_ranks, ranks, Rectangle(start, extent)


@settings(deadline=None, max_examples=60)
@given(tilings())
def test_any_rectangle_of_any_tiling_by_any_ranks_reads_as_numpy_indexes_it(tmp_path_factory, case):
    shape, tiles, num_ranks, ranks, wanted = case
    array = np.asarray(np.random.default_rng(0).standard_normal(shape))
    slices = [
        [
            part("x", array, tile, is_writer=rank == owner)
            for tile, owner in zip(tiles, ranks, strict=True)
        ]
        for rank in range(num_ranks)
    ]
    reader = CheckpointReader(save(tmp_path_factory.mktemp("tiles"), 1, *slices))
    reader.verify()
    np.testing.assert_array_equal(reader.read("x"), array)
    np.testing.assert_array_equal(
        reader.read("x", wanted.start, wanted.shape), array[wanted.slices]
    )


def test_only_the_slices_a_rectangle_meets_are_read(tmp_path):
    array = matrix()
    top, bottom = Rectangle((0, 0), (2, 6)), Rectangle((2, 0), (2, 6))
    path = save(tmp_path, 1, [part("x", array, top)], [part("x", array, bottom)])
    (path / "part-00001.safetensors").unlink()
    reader = CheckpointReader(path)
    np.testing.assert_array_equal(reader.read("x", (1, 2), (1, 3)), array[1:2, 2:5])
    with pytest.raises(UnreadableCheckpointError, match=r"part-00001.* cannot be read: No such"):
        reader.read("x", (1, 2))


def test_a_rank_without_slices_writes_no_part_but_is_waited_for(tmp_path):
    path = save(tmp_path, 1, [], [whole("x", matrix())], [])
    manifest = CheckpointReader(path).manifest
    assert list(manifest["files"]) == ["part-00001.safetensors"]
    assert manifest["num_ranks"] == 3


@pytest.mark.parametrize(
    ("slices_by_rank", "message"),
    [
        (
            [[part("good/x", matrix(), Rectangle((0, 0), (4, 3)))], [whole("good/x", matrix())]],
            r"good/x, shape \(4, 6\), have an overlap of \[0:4, 0:3\] \(part-00000.safetensors\)"
            r" and \[0:4, 0:6\] \(part-00001.safetensors\)",
        ),
        (
            [[part("good/x", matrix(), Rectangle((0, 0), (4, 5)))], []],
            r"good/x, shape \(4, 6\), have a gap: the slices cover 20 of 24 elements",
        ),
        (
            [[whole("good/x", matrix(), is_writer=False)], []],
            r"good/x, shape \(4, 6\), have a gap: the slices cover 0 of 24 elements",
        ),
        (
            [[Slice("good/x", (4, 6), (1, 0), matrix(), True)], []],
            r"good/x.*\[1:5, 0:6\] is not within shape \(4, 6\)",
        ),
        (
            [[whole("good/x", matrix())], [whole("good/x", matrix(shape=(4, 7)), False)]],
            r"good/x has shape \[4, 7\] on rank 1, but \[4, 6\]",
        ),
        (
            [
                [part("good/x", matrix(), Rectangle((0, 0), (2, 6)))],
                [part("good/x", matrix().astype("f8"), Rectangle((2, 0), (2, 6)))],
            ],
            "good/x has dtype float64 on rank 1, but float32",
        ),
    ],
)
def test_slices_that_do_not_tile_a_variable_are_refused_and_named(
    tmp_path, slices_by_rank, message
):
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path, 1, *slices_by_rank)
    assert list_checkpoints(tmp_path) == []


def test_a_missing_rank_is_named_after_a_bounded_wait(tmp_path):
    writer = CheckpointWriter(tmp_path, rank=0, num_ranks=3, timeout_seconds=0.2)
    CheckpointWriter(tmp_path, rank=1, num_ranks=3).save(7, [], RunState(), "now")
    begin = time.monotonic()
    with pytest.raises(CheckpointError, match=r"step 7 not saved: no part of rank 2 appeared"):
        writer.save(7, [whole("x", matrix())], RunState(), "now")
    assert time.monotonic() - begin >= 0.2
    with pytest.raises(CheckpointError, match=r"step 7: rank 0 wrote no manifest.json within"):
        CheckpointWriter(tmp_path, 1, 3, timeout_seconds=0.05).wait_until_complete(7, "now")


def test_a_rank_that_fails_is_named_at_once(tmp_path):
    def fail():
        raise RuntimeError("the device is lost")

    lost = Slice("x", (2,), (0,), LazyArray((2,), "float32", fail), True)
    with pytest.raises(RuntimeError, match="the device is lost"):
        CheckpointWriter(tmp_path, 1, 2).save(7, [lost], RunState(), "now")
    with pytest.raises(CheckpointError, match="rank 1 could not write its part: the device is lo"):
        CheckpointWriter(tmp_path, 0, 2, timeout_seconds=60).save(7, [], RunState(), "now")
    assert list((tmp_path / "step_00000007").iterdir()) == []


def test_parts_of_an_earlier_attempt_are_not_merged(tmp_path):
    old, new = matrix(1), matrix(2)
    top, bottom = Rectangle((0, 0), (2, 6)), Rectangle((2, 0), (2, 6))
    # Three ranks saved, and died before rank 0 merged.
    for rank in (1, 2):
        CheckpointWriter(tmp_path, rank, 3).save(5, [whole("x", old)], RunState(), "old")
    writer = CheckpointWriter(tmp_path, 0, 2, timeout_seconds=0.1)
    with pytest.raises(CheckpointError, match="no part of rank 1 appeared"):
        writer.save(5, [part("x", new, top)], RunState(), "new")
    path = save(tmp_path, 5, [part("x", new, top)], [part("x", new, bottom)], attempt="newer")
    np.testing.assert_array_equal(CheckpointReader(path).read("x"), new)
    assert len(list(path.iterdir())) == 3  # nothing of the earlier attempts is left


def test_a_step_saved_again_replaces_the_old_one_and_names_stay_free(tmp_path):
    top, bottom = Rectangle((0, 0), (2, 6)), Rectangle((2, 0), (2, 6))
    for attempt in range(4):
        array = matrix(attempt)
        slices = [part("x", array, top)], [part("x", array, bottom)]
        path = save(tmp_path, 5, *slices, attempt=str(attempt))
        reader = CheckpointReader(path)
        reader.verify()
        np.testing.assert_array_equal(reader.read("x"), array)
        assert {entry.name for entry in path.iterdir()} == {
            "manifest.json",
            *reader.manifest["files"],
        }


def test_waiting_for_a_save_is_not_ended_by_an_earlier_one(tmp_path):
    save(tmp_path, 5, [], [whole("x", matrix())], attempt="old")
    waiter = CheckpointWriter(tmp_path, 1, 2, timeout_seconds=0.05)
    waiter.wait_until_complete(5, "old")
    with pytest.raises(CheckpointError, match=r"step 5: rank 0 wrote no manifest.json within"):
        waiter.wait_until_complete(5, "new")


def test_a_damaged_manifest_does_not_stop_its_step_from_being_saved(tmp_path):
    path = save(tmp_path, 5, [whole("x", matrix(1))])
    (path / "manifest.json").write_bytes(b"\0" * 100)
    with pytest.raises(UnreadableCheckpointError, match=r"manifest.json is damaged: not JSON"):
        CheckpointReader(path)
    save(tmp_path, 5, [whole("x", matrix(2))], attempt="b")
    np.testing.assert_array_equal(CheckpointReader(path).read("x"), matrix(2))


def _save_steps(checkpoints_dir, rank, num_ranks):
    """One rank's process: saves five steps and waits for each."""
    writer = CheckpointWriter(checkpoints_dir, rank, num_ranks, timeout_seconds=60)
    for step in range(1, 6):
        array = matrix(step, (num_ranks * 100, 1000))
        mine = Rectangle((rank * 100, 0), (100, 1000))
        time.sleep(0.02 * ((rank + step) % 3))
        writer.save(step, [part("x", array, mine)], RunState(consumed_samples=step), f"try {step}")
        writer.wait_until_complete(step, f"try {step}")
        assert latest(checkpoints_dir).step == step


def test_ranks_in_real_processes_save_together(tmp_path):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_save_steps, args=(tmp_path, rank, 3)) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=100)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    for info in list_checkpoints(tmp_path):
        reader = CheckpointReader(info.path)
        reader.verify()
        np.testing.assert_array_equal(reader.read("x"), matrix(info.step, (300, 1000)))
    assert steps(tmp_path) == [1, 2, 3, 4, 5]


def test_checkpoints_and_run_folders_need_no_tensorflow():
    code = (
        "import sys; sys.modules['tensorflow'] = sys.modules['keras'] = None\n"
        "import tfbig.checkpoint, tfbig.checkpoint_writer, tfbig.run_folder\n"
    )
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60)
    assert done.returncode == 0
