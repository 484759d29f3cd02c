"""A save is stopped at every one of its file operations, by death and by a full disk."""

import errno
import itertools
import multiprocessing
import os
import shutil
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest

from tfbig.checkpoint import list_checkpoints, newest_that_verifies, prune
from tfbig.checkpoint_format import CheckpointError, RunState, Slice
from tfbig.checkpoint_reader import CheckpointReader
from tfbig.checkpoint_writer import CheckpointWriter

OPERATIONS = ("open", "write", "fsync", "replace", "mkdir", "unlink", "rmdir", "close")
KILLED = 77


def arrays(seed):
    generator = np.random.default_rng(seed)
    return {
        "a/kernel": generator.standard_normal((4, 6)).astype(np.float32),
        "b/bias": generator.standard_normal(5).astype(np.float32),
        "iterations": np.array(seed, np.int64),
    }


def save(checkpoints_dir, step, seed, attempt, num_ranks=2):
    """Saves with every rank in turn; the kernel is cut between them."""
    for rank in reversed(range(num_ranks)):
        slices = []
        for path, array in arrays(seed).items():
            if path == "a/kernel":
                begin, end = rank * 4 // num_ranks, (rank + 1) * 4 // num_ranks
                slices.append(Slice(path, array.shape, (begin, 0), array[begin:end], True))
            else:
                start = (0,) * array.ndim
                slices.append(Slice(path, array.shape, start, array, rank == num_ranks - 1))
        writer = CheckpointWriter(checkpoints_dir, rank, num_ranks, timeout_seconds=0.05)
        writer.save(step, slices, RunState(metadata={"seed": seed}), attempt)


def intact_seed(path):
    """Returns the seed of a checkpoint, all of which must be intact and of that one seed."""
    reader = CheckpointReader(path)
    reader.verify()
    seed = reader.manifest["metadata"]["seed"]
    for name, array in arrays(seed).items():
        np.testing.assert_array_equal(reader.read(name), array)
    return seed


def with_file_operations(wrap):
    """Replaces every file operation of os by wrap(name, real operation)."""
    for name in OPERATIONS:
        setattr(os, name, wrap(name, getattr(os, name)))


def die_at(count):
    """Ends this process at the count-th file operation; in the middle of it if it is a write."""
    numbers = itertools.count(1)

    def wrap(name, real):
        def operation(*args, **kwargs):
            if next(numbers) == count:
                if name == "write":
                    real(args[0], memoryview(args[1])[: len(args[1]) // 2])
                os._exit(KILLED)
            # Death by _exit loses no page of the kernel's, so that the wait can be saved.
            return None if name == "fsync" else real(*args, **kwargs)

        return operation

    return wrap


def runs_to_its_end(action, count):
    """Runs an action in a child that dies at the count-th operation; says whether it got so far."""
    child = os.fork()
    if child == 0:
        try:
            with_file_operations(die_at(count))
            action()
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED), f"the save failed at operation {count}"
    return code == 0


def kill_saves_everywhere(base, scenario):
    """Runs in a process of its own, which has no threads; returns how often a save was killed."""
    template = base / "template"
    save(template, 1, seed=1, attempt="first")
    if scenario == "replaced":
        save(template, 2, seed=2, attempt="second")
    if scenario == "leftovers":
        # The last operations of a save: it died after its parts, before its manifest.
        assert not runs_to_its_end(lambda: save(template, 2, 9, "crashed", num_ranks=3), 40)
        assert len(list((template / "step_00000002").iterdir())) >= 3
    seeds_seen = set()
    for count in itertools.count(1):
        folder = base / f"killed at {count}"
        shutil.copytree(template, folder)
        finished = runs_to_its_end(lambda folder=folder: save(folder, 2, 3, "third"), count)
        complete = {info.step: intact_seed(info.path) for info in list_checkpoints(folder)}
        assert complete.pop(1) == 1
        # The new one doesn't exist, or is complete; an old one holds until then.
        old = 2 if scenario == "replaced" else None
        assert complete.get(2) in ({3} if finished else {old, 3}), f"killed at {count}"
        seeds_seen.add(complete.get(2))
        # What was left behind is in nobody's way.
        save(folder, 2, seed=4, attempt="fourth")
        assert intact_seed(folder / "step_00000002") == 4
        names = {path.name for path in (folder / "step_00000002").iterdir()}
        files = CheckpointReader(folder / "step_00000002").manifest["files"]
        assert names == {"manifest.json", *files}, f"killed at {count}"
        shutil.rmtree(folder)
        if finished:
            assert seeds_seen == {old, 3}
            return count - 1
    raise AssertionError


def kill_prunes_everywhere(base):
    """Runs in a process of its own; returns how often pruning was killed."""
    template = base / "template"
    for step in (1, 2, 3):
        save(template, step, seed=step, attempt=str(step))
    for count in itertools.count(1):
        folder = base / f"killed at {count}"
        shutil.copytree(template, folder)
        finished = runs_to_its_end(lambda folder=folder: prune(folder, keep_last=1), count)
        complete = {info.step: intact_seed(info.path) for info in list_checkpoints(folder)}
        assert complete[3] == 3
        prune(folder, keep_last=1)
        assert [info.step for info in list_checkpoints(folder)] == [3]
        if finished:
            assert [path.name for path in folder.iterdir()] == ["step_00000003"]
            return count - 1
    raise AssertionError


def in_a_process_of_its_own(function, *args):
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *args).result(timeout=300)


@pytest.mark.parametrize("scenario", ["new", "replaced", "leftovers"])
def test_a_save_killed_at_any_operation_leaves_the_old_or_the_new(tmp_path, scenario):
    num_kills = in_a_process_of_its_own(kill_saves_everywhere, tmp_path, scenario)
    assert num_kills > 40


def test_a_prune_killed_at_any_operation_leaves_the_newest(tmp_path):
    assert in_a_process_of_its_own(kill_prunes_everywhere, tmp_path) > 10


def fill_disks_everywhere(base, scenario):
    """Runs in a process of its own; returns how many operations found the disk full."""
    template = base / "template"
    save(template, 1, seed=1, attempt="first")
    if scenario == "replaced":
        save(template, 2, seed=2, attempt="second")
    real_operations = {name: getattr(os, name) for name in OPERATIONS}
    for count in itertools.count(1):
        folder = base / f"full at {count}"
        shutil.copytree(template, folder)
        numbers = itertools.count(1)
        num_errors = 0

        def fill(name, real, count=count, numbers=numbers):
            def operation(*args, **kwargs):
                nonlocal num_errors
                writes = name in ("write", "mkdir", "fsync") or (
                    name == "open" and args[1] & os.O_CREAT
                )
                if next(numbers) >= count and writes:
                    num_errors += 1
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return None if name == "fsync" else real(*args, **kwargs)

            return operation

        with_file_operations(fill)
        try:
            save(folder, 2, seed=3, attempt="third", num_ranks=1)
            error = None
        except CheckpointError as caught:
            error = str(caught)
        finally:
            for name, real in real_operations.items():
                setattr(os, name, real)
        assert (error is None) == (num_errors == 0)
        complete = {info.step: intact_seed(info.path) for info in list_checkpoints(folder)}
        assert complete.pop(1) == 1
        if error is None:
            assert complete == {2: 3}
            return count - 1
        assert "step 2 not saved: [Errno 28] No space left on device" in error
        old = 2 if scenario == "replaced" else None
        assert complete.get(2) in (old, 3)
        # The room it took is free again; only small files may stay.
        assert {path.suffix for path in folder.glob("step_00000002/*")} <= {".json", ".safetensors"}
        named = CheckpointReader(folder / "step_00000002").manifest["files"] if complete else {}
        assert {path.name for path in folder.glob("*2/*.safetensors")} == set(named)
        save(folder, 2, seed=4, attempt="fourth")
        assert intact_seed(folder / "step_00000002") == 4
    raise AssertionError


@pytest.mark.parametrize("scenario", ["new", "replaced"])
def test_a_disk_that_is_full_at_any_operation_costs_the_new_checkpoint_only(tmp_path, scenario):
    assert in_a_process_of_its_own(fill_disks_everywhere, tmp_path, scenario) > 15


def test_everything_is_durable_before_the_manifest_names_it(tmp_path, monkeypatch):
    """Power loss: a page not fsynced, or a name in a directory not fsynced, may be gone."""
    paths, unsynced_files, unsynced_names, commits = {}, set(), set(), []

    def note(name, real):
        def operation(*args, **kwargs):
            if name == "replace" and os.path.basename(args[1]) == "manifest.json":
                new_name = {os.fspath(args[0])}  # the manifest's own temporary name
                commits.append((set(unsynced_files), set(unsynced_names) - new_name))
            result = real(*args, **kwargs)
            if name == "open":
                paths[result] = os.fspath(args[0])
                if args[1] & os.O_CREAT:
                    unsynced_names.add(os.fspath(args[0]))
            elif name == "write":
                unsynced_files.add(paths[args[0]])
            elif name == "fsync":
                unsynced_files.discard(paths[args[0]])
                unsynced_names.difference_update(
                    {path for path in unsynced_names if os.path.dirname(path) == paths[args[0]]}
                )
            elif name in ("mkdir", "replace"):
                unsynced_names.discard(os.fspath(args[0]))
                unsynced_names.add(os.fspath(args[-1]))
            return result

        return operation

    for name in ("open", "write", "fsync", "replace", "mkdir"):
        monkeypatch.setattr(os, name, note(name, getattr(os, name)))
    save(tmp_path / "run" / "checkpoints", 1, seed=1, attempt="first")
    save(tmp_path / "run" / "checkpoints", 1, seed=2, attempt="second")
    monkeypatch.undo()
    assert commits == [(set(), set())] * 2
    assert unsynced_files == unsynced_names == set()
    assert newest_that_verifies(tmp_path / "run" / "checkpoints")[0].step == 1
