"""GPUs as the driver shows them and as a run will use them; cores. TensorFlow-free."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tfbig.diagnosis.finding import Examined
from tfbig.profiler.cgroup_limits import Limits, find_limits

_GIB = 1 << 30
_BUSY_SHARE = 0.05  # of a GPU's memory that others may hold before it is worth a line


class Gpu(NamedTuple):
    """One GPU of the host, as NVML describes it."""

    name: str
    memory_bytes: int
    used_bytes: int
    uncorrected_errors: int


def read_gpus() -> tuple[list[Gpu], str]:
    """Returns the host's GPUs and their driver's version; ([], "") where NVML shows none."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except ImportError:
        return [], ""
    except Exception:  # NVMLError: no driver, no permission, no GPU
        return [], ""
    try:
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        return [_gpu(nvml, handle) for handle in handles], driver
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, handle: Any) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        errors = nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
    except nvml.NVMLError:  # a GPU without error correction
        errors = 0
    name = _text(nvml.nvmlDeviceGetName(handle))
    return Gpu(name, int(memory.total), int(memory.used), int(errors))


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def examine(
    gpus: Sequence[Gpu],
    driver: str,
    has_files: bool,
    seen: Mapping[str, Any],
    local_size: int = 1,
    environ: Mapping[str, str] = os.environ,
) -> Examined:
    """Returns what is wrong with the GPUs of this host.

    Args:
      gpus: of `read_gpus`.
      driver: its version.
      has_files: whether the driver has made files of devices, so that there are GPUs.
      seen: {"gpus": number that TensorFlow sees, "cuda": whether it was built with it}; empty
        where TensorFlow could not be asked.
      local_size: ranks that this host will run.
      environ: CUDA_VISIBLE_DEVICES is looked at.
    """
    found = Examined(facts={"GPUs": _names(gpus) or "none", "GPU driver": driver or "none"})
    if not gpus:
        if has_files:
            found.add(
                "devices",
                "problem",
                "this host has GPUs, but NVML shows none",
                "install nvidia-ml-py and the driver's libraries (in a container: start it with "
                "--gpus all)",
            )
        else:
            found.add("devices", "fine", "no GPU: training runs on the CPU")
        return found
    memory = min(gpu.memory_bytes for gpu in gpus) / _GIB
    found.add("devices", "fine", f"{_names(gpus)} of {memory:.0f} GiB, driver {driver}")
    _look_at_each(gpus, found)
    _look_at_use(len(gpus), seen, local_size, environ.get("CUDA_VISIBLE_DEVICES"), found)
    return found


def _names(gpus: Sequence[Gpu]) -> str:
    names = [gpu.name for gpu in gpus]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _look_at_each(gpus: Sequence[Gpu], found: Examined) -> None:
    if len({gpu.name for gpu in gpus}) > 1:
        found.add(
            "devices",
            "warning",
            "the GPUs of this host are of different kinds",
            "choose equal ones by CUDA_VISIBLE_DEVICES: the slowest sets the pace",
        )
    for index, gpu in enumerate(gpus):
        if gpu.used_bytes > _BUSY_SHARE * gpu.memory_bytes:
            used = gpu.used_bytes / _GIB
            text = f"GPU {index}: {used:.1f} GiB of its memory are taken"
            found.add("devices", "warning", text, "end the other job, or leave this GPU out")
        if gpu.uncorrected_errors:
            text = f"GPU {index}: {gpu.uncorrected_errors} uncorrected memory errors"
            found.add("devices", "problem", text, "take this host out and have the GPU looked at")


def _look_at_use(
    count: int, seen: Mapping[str, Any], local_size: int, visible: str | None, found: Examined
) -> None:
    if not seen:
        return
    if not seen["cuda"]:
        found.add(
            "devices",
            "problem",
            "TensorFlow was built without CUDA and would train on the CPU",
            "pip uninstall tensorflow-cpu, then pip install 'tfbig[gpu]'",
        )
    elif seen["gpus"] < count and visible is None:
        found.add(
            "devices",
            "problem",
            f"the driver shows {count} GPUs, TensorFlow {seen['gpus']}: CUDA's libraries are "
            "missing or too old",
            "pip install 'tensorflow[and-cuda]', or update the driver",
        )
    elif visible is not None:
        text = f"CUDA_VISIBLE_DEVICES={visible} shows {seen['gpus']} of {count} GPUs"
        found.add("devices", "fine", text)
    # A launcher that gives each process one GPU of its own is as good as all of them.
    if (seen["gpus"] not in (0, 1) and seen["gpus"] < local_size) or count < local_size:
        text = f"{local_size} ranks on this host, which shows {min(count, seen['gpus'])} GPUs"
        found.add("devices", "problem", text, "start one rank a GPU: two on one hang in NCCL")


def examine_cores(local_size: int = 1, limits: Limits | None = None) -> Examined:
    """Returns whether the ranks of this host have cores to run on."""
    limits, found = limits or find_limits(), Examined()
    share = min(len(limits.cores), limits.cpu_quota)
    text = f"{share:g} cores for {local_size} rank{'s' * (local_size != 1)}"
    if share < local_size:
        found.add("devices", "warning", text, "start fewer ranks, or give the container more cores")
    else:
        found.add("devices", "fine", text)
    return found
