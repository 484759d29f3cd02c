"""GPUs and cores: each thing that would spoil a run has its line."""

import importlib
import sys

import pytest

from tfbig.diagnosis.devices import Gpu, examine, examine_cores, read_gpus
from tfbig.profiler.cgroup_limits import Limits

GIB = 1 << 30
GOOD = Gpu("L4", 24 * GIB, 0, 0)


NVML = """
import types

class NVMLError(Exception):
    pass

NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
is_open = False
GPUS = [(b"L4", 24 << 30, 3 << 30, 2), ("T4", 16 << 30, 0, None)]  # old releases give bytes

def nvmlInit():
    global is_open
    {init}
    is_open = True

def nvmlShutdown():
    global is_open
    is_open = False

def nvmlSystemGetDriverVersion():
    assert is_open
    return b"550.54"

def nvmlDeviceGetCount():
    return len(GPUS)

def nvmlDeviceGetHandleByIndex(index):
    return GPUS[index]

def nvmlDeviceGetName(handle):
    return handle[0]

def nvmlDeviceGetMemoryInfo(handle):
    return types.SimpleNamespace(total=handle[1], used=handle[2])

def nvmlDeviceGetTotalEccErrors(handle, kind, counter):
    assert (kind, counter) == (NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC)
    if handle[3] is None:
        raise NVMLError("Not Supported")
    return handle[3]
"""


@pytest.fixture
def nvml(tmp_path, monkeypatch):
    """Puts a module in NVML's place, as no driver is here; gives what writes and returns it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(**lines):
        (tmp_path / "pynvml.py").write_text(NVML.format_map({"init": ""} | lines))
        monkeypatch.delitem(sys.modules, "pynvml", raising=False)
        importlib.invalidate_caches()
        return importlib.import_module("pynvml")

    yield make
    sys.modules.pop("pynvml", None)


def test_gpus_as_nvml_describes_them(nvml):
    module = nvml()
    gpus, driver = read_gpus()
    assert gpus == [Gpu("L4", 24 * GIB, 3 * GIB, 2), Gpu("T4", 16 * GIB, 0, 0)]
    assert driver == "550.54" and not module.is_open


def test_an_nvml_that_shows_nothing(nvml, monkeypatch):
    nvml(init='raise NVMLError("Driver Not Loaded")')
    assert read_gpus() == ([], "")
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as where it is not installed
    assert read_gpus() == ([], "")


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
