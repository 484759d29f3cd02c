"""GPUs and cores: each thing that would spoil a run has its line."""

import pytest

from tfbig.diagnosis.devices import Gpu, examine, examine_cores
from tfbig.profiler.cgroup_limits import Limits

GIB = 1 << 30
GOOD = Gpu("L4", 24 * GIB, 0, 0)


def problems(found):
    return [f.text for f in found.findings if f.level != "fine"]


def test_good_gpus():
    found = examine([GOOD, GOOD], "550", True, {"gpus": 2, "cuda": True}, 2, {})
    assert not problems(found)
    assert found.facts == {"GPUs": "2 x L4", "GPU driver": "550"}


def test_no_gpu_and_a_driver_that_is_not_seen():
    assert not problems(examine([], "", False, {"gpus": 0, "cuda": False}))
    assert "NVML shows none" in problems(examine([], "", True, {}))[0]


@pytest.mark.parametrize(
    ("gpus", "seen", "local_size", "environ", "words"),
    [
        ([GOOD], {"gpus": 0, "cuda": False}, 1, {}, "built without CUDA"),
        ([GOOD] * 2, {"gpus": 0, "cuda": True}, 1, {}, "shows 2 GPUs, TensorFlow 0"),
        ([GOOD] * 2, {"gpus": 2, "cuda": True}, 3, {}, "3 ranks on this host, which shows 2"),
        ([GOOD] * 8, {"gpus": 2, "cuda": True}, 4, {"CUDA_VISIBLE_DEVICES": "0,1"}, "4 ranks"),
        ([GOOD, Gpu("T4", GIB, 0, 0)], {}, 1, {}, "different kinds"),
        ([Gpu("L4", 24 * GIB, 6 * GIB, 0)], {}, 1, {}, "GPU 0: 6.0 GiB of its memory are taken"),
        ([Gpu("L4", 24 * GIB, 0, 3)], {}, 1, {}, "GPU 0: 3 uncorrected memory errors"),
    ],
)
def test_what_spoils_a_run(gpus, seen, local_size, environ, words):
    found = problems(examine(gpus, "550", True, seen, local_size, environ))
    assert len(found) == 1 and words in found[0]


def test_a_gpu_of_its_own_for_each_process_is_fine():
    environ = {"CUDA_VISIBLE_DEVICES": "3"}
    found = examine([GOOD] * 8, "550", True, {"gpus": 1, "cuda": True}, 8, environ)
    assert not problems(found)
    assert "CUDA_VISIBLE_DEVICES=3 shows 1 of 8" in found.findings[-1].text


def test_cores():
    assert not problems(examine_cores(2, Limits((0, 1), 2.0, GIB)))
    assert problems(examine_cores(2, Limits((0, 1), 1.5, GIB))) == ["1.5 cores for 2 ranks"]
