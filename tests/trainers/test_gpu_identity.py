"""One GPU a rank: which one a process takes, and what finds two ranks on the same one."""

import numpy as np
import pytest

from tfbig.errors import UserError
from tfbig.together import SharedError
from trainers.collectives import check_world_size
from trainers.devices import own_gpu
from trainers.gpu_identity import check_own_gpu, gpu_uuid


class Gathered:
    """An engine whose other ranks have sent what is given."""

    def __init__(self, uuids):
        self._uuids = uuids

    def gather(self, values):
        own = []

        class One:
            def gather(self, value):
                own.append(int(value[0]))
                return np.array([-1])

        for uuid in self._uuids:
            check_own_gpu(One(), uuid)
        assert values[0] in own
        return np.array(own, np.int64)


def test_a_gpu_by_number_or_the_one_that_a_launcher_has_chosen():
    narrowed = {"CUDA_VISIBLE_DEVICES": "3"}
    assert own_gpu(8, 5, 8, {}) == 5
    assert own_gpu(1, 5, 8, narrowed) == 0
    assert own_gpu(1, 0, 1, {}) == 0
    for num_gpus, environ in ((1, {}), (2, {"CUDA_VISIBLE_DEVICES": "0,1"})):
        with pytest.raises(UserError, match=f"start at most {num_gpus} on a host"):
            own_gpu(num_gpus, 2, 3, environ)


def test_two_ranks_on_one_gpu_are_refused_on_every_rank():
    check_own_gpu(Gathered([b"a", b"b", b"c"]), b"b")
    check_own_gpu(Gathered([b"", b"", b"a"]), b"")  # without GPUs there is nothing to share
    for own in (b"a", b"b"):
        with pytest.raises(SharedError, match="ranks 1 and 2 drive the same GPU"):
            check_own_gpu(Gathered([b"a", b"b", b"b"]), own)


def test_without_a_driver_there_is_no_identity(monkeypatch):
    import ctypes

    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert gpu_uuid(0) == b""


def test_a_world_as_large_as_the_launcher_made_it():
    check_world_size(1, {})
    check_world_size(4, {"HOROVOD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "2"})
    check_world_size(2, {"OMPI_COMM_WORLD_SIZE": "2"})
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        with pytest.raises(UserError, match=f"{name}=8, but .* in a world of 1"):
            check_world_size(1, {name: "8"})
