"""What the host's NVIDIA GPUs do, through NVML; nothing where there is none."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfbig.profiler.host_metrics import Metric

# GPU performance monitoring of Hopper and later, without the counters' exclusive use
# (docs.nvidia.com, NVML API, "GPM"): number of the metric in NVML, and our name of it.
_GPM_METRICS = {2: "SMActivePercent", 5: "TensorActivePercent", 10: "DRAMActivePercent"}
# Reasons to run slower than asked that are no fault: idle, and clocks set by applications.
_HARMLESS_THROTTLING = 0x1 | 0x2


class GpuMetrics:
    """Samples the GPUs of the host that the run may use, under their numbers on the host.

    Args:
      nvml: the module pynvml, initialised.
      visible: CUDA_VISIBLE_DEVICES; None means all.
      num_processes: of the run on this host.
    """

    def __init__(self, nvml: Any, visible: str | None = None, num_processes: int = 1) -> None:
        self._nvml = nvml
        # Looking a handle up anew at each sample costs more than reading it.
        everyone = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in everyone]
        chosen = visible_gpus(uuids, visible, num_processes)
        self._handles = {index: everyone[index] for index in chosen}
        self._gpm = {i: sample for i, h in self._handles.items() if (sample := self._start_gpm(h))}

    def sample(self) -> list[Metric]:
        """Returns what the GPUs did; a number that a GPU doesn't give is left out."""
        return [metric for index in self._handles for metric in self._sample_one(index)]

    def names(self) -> list[str]:
        """Returns the GPUs' names."""
        return [_text(self._nvml.nvmlDeviceGetName(handle)) for handle in self._handles.values()]

    def close(self) -> None:
        """Leaves NVML."""
        for samples in self._gpm.values():
            for sample in samples:
                with contextlib.suppress(self._nvml.NVMLError):
                    self._nvml.nvmlGpmSampleFree(sample)
        self._nvml.nvmlShutdown()

    def _sample_one(self, index: int) -> Iterator[Metric]:
        nvml, handle = self._nvml, self._handles[index]
        readings: dict[str, Callable[[], float]] = {
            "GPUUtilization": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "GPUMemoryUtilization": lambda: self._memory_percent(handle),
            "PowerWatts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "EnergyJoules": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000,
            "TemperatureCelsius": lambda: nvml.nvmlDeviceGetTemperature(
                handle, nvml.NVML_TEMPERATURE_GPU
            ),
            "SMClockMHz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "MemoryClockMHz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "Throttled": lambda: bool(
                nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) & ~_HARMLESS_THROTTLING
            ),
        }
        for dimension, read in readings.items():
            with contextlib.suppress(nvml.NVMLError):
                yield Metric("gpu", dimension, f"gpu{index}", float(read()))
        for dimension, value in self._gpm_values(index).items():
            yield Metric("gpu", dimension, f"gpu{index}", value)

    def _memory_percent(self, handle: Any) -> float:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        return 100 * memory.used / memory.total

    def _start_gpm(self, handle: Any) -> list[Any]:
        """Returns the last and the next GPM sample of a GPU, [] where it has none."""
        nvml = self._nvml
        try:
            if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                return []
            samples = [nvml.nvmlGpmSampleAlloc() for _ in range(2)]
            nvml.nvmlGpmSampleGet(handle, samples[0])
        except (nvml.NVMLError, AttributeError):
            return []
        return samples

    def _gpm_values(self, index: int) -> dict[str, float]:
        if index not in self._gpm:
            return {}
        nvml, (last, following) = self._nvml, self._gpm[index]
        try:
            nvml.nvmlGpmSampleGet(self._handles[index], following)
            request = nvml.c_nvmlGpmMetricsGet_t()
            request.version, request.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, 3
            request.sample1, request.sample2 = last, following
            for place, number in enumerate(_GPM_METRICS):
                request.metrics[place].metricId = number
            nvml.nvmlGpmMetricsGet(request)
        except nvml.NVMLError:
            return {}
        self._gpm[index] = [following, last]
        return {
            name: float(request.metrics[place].value)
            for place, name in enumerate(_GPM_METRICS.values())
        }


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def visible_gpus(uuids: Sequence[str], visible: str | None, num_processes: int) -> list[int]:
    """Returns the numbers of the GPUs that the run may use.

    Args:
      uuids: of the host's GPUs.
      visible: CUDA_VISIBLE_DEVICES of this process; None means all.
      num_processes: of the run on this host. Where a launcher gives each one GPU of its own, this
        process doesn't know the others': then all of the host's count.

    >>> visible_gpus(["GPU-a", "GPU-b", "GPU-c"], "2,GPU-a", 1)
    [0, 2]
    """
    if visible is None:
        return list(range(len(uuids)))
    chosen = set()
    for word in filter(None, (word.strip() for word in visible.split(","))):
        if word.isdigit() and int(word) < len(uuids):
            chosen.add(int(word))
            continue
        found = [index for index, uuid in enumerate(uuids) if uuid.startswith(word)]
        if not found:
            # CUDA takes no device behind one that it doesn't know; a part of a GPU (MIG) is known.
            if word.startswith("MIG"):
                return list(range(len(uuids)))
            break
        chosen.add(found[0])
    if chosen and len(chosen) < num_processes:
        return list(range(len(uuids)))
    return sorted(chosen)


def open_gpu_metrics(
    num_processes: int = 1, environment: Mapping[str, str] = os.environ
) -> GpuMetrics | None:
    """Returns the run's GPUs on this host, None without nvidia-ml-py, a driver or a GPU."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        if not pynvml.nvmlDeviceGetCount():
            return None
        return GpuMetrics(pynvml, environment.get("CUDA_VISIBLE_DEVICES"), num_processes)
    except pynvml.NVMLError:
        return None
