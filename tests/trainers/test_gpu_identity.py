"""One GPU a rank: which one a process takes, and what finds two ranks on the same one."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest

from tfbig.errors import UserError
from tfbig.together import SharedError
from trainers.devices import own_gpu
from trainers.gpu_identity import check_own_gpus, gpu_uuid
from trainers.world_size import check_world_size


def check_ranks(*uuids):
    """Runs the check in a thread a rank, each with its GPUs; returns what the ranks raise."""
    size = len(uuids)
    barrier, board = threading.Barrier(size, timeout=20), {}

    class Rank(NamedTuple):
        number: int

        def everyones(self, value):
            board[self.number] = value
            barrier.wait()
            values = [board[rank] for rank in range(size)]
            barrier.wait()
            return values

        def agree(self, value, op):
            return {"max": max}[op](self.everyones(value))

        def gather(self, values):
            return np.concatenate(self.everyones(values))

        def check(self):
            try:
                check_own_gpus(self, uuids[self.number])
            except SharedError as error:
                return str(error)

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(Rank.check, map(Rank, range(size))))
    return [line for line in results if line]


def test_a_gpu_by_number_or_the_one_that_a_launcher_has_chosen():
    narrowed = {"CUDA_VISIBLE_DEVICES": "3"}
    assert own_gpu(8, 5, 8, {}) == 5
    assert own_gpu(1, 5, 8, narrowed) == 0
    assert own_gpu(1, 0, 1, {}) == 0
    for num_gpus, environ in ((1, {}), (2, {"CUDA_VISIBLE_DEVICES": "0,1"})):
        with pytest.raises(UserError, match=f"start at most {num_gpus} on a host"):
            own_gpu(num_gpus, 2, 3, environ)


def test_two_ranks_on_one_gpu_are_refused_on_every_rank():
    assert check_ranks([b"a"], [b"b"], [b"c"]) == []
    assert check_ranks([b""], [b""], [b"a"]) == []  # what cannot be told is no other's
    assert check_ranks([b"a", b"b"], [b"c"], []) == []
    for shared in ([[b"c"], [b"a"], [b"a"]], [[], [b"a", b"b"], [b"c", b"b"]]):
        lines = check_ranks(*shared)
        assert len(lines) == 3 and len(set(lines)) == 1
        assert lines[0].startswith("ranks 1 and 2 drive the same GPU")


def test_without_a_driver_there_is_no_identity(monkeypatch):
    import ctypes

    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert gpu_uuid(0) == b""


def test_a_world_as_large_as_the_launcher_made_it():
    check_world_size(1, "", {})
    check_world_size(4, "", {"HOROVOD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "8"})
    check_world_size(2, "", {"OMPI_COMM_WORLD_SIZE": "2"})
    check_world_size(2, "", {"SLURM_STEP_NUM_TASKS": "1"})  # TF_CONFIG names one of another step
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        with pytest.raises(SharedError, match=f"{name}=8, but .* in a world of 1: start one"):
            check_world_size(1, "start one", {name: "8"})
