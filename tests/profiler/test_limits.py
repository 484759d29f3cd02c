"""What a host's limits are: nested cgroups of both versions, quotas, and GPUs that are hidden."""

import types

import psutil
import pytest

from tfbig.profiler.cgroup_limits import cpu_seconds, find_limits, memory_file
from tfbig.profiler.gpu_metrics import GpuMetrics, visible_gpus
from tfbig.profiler.host_metrics import HostMetrics
from tfbig.profiler.place import host_place


def write(folder, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_a_jobs_group_below_the_root_counts(tmp_path):
    """Slurm sets memory on the job, cores on the step; the process is in a task of it."""
    job = tmp_path / "system.slice/slurmstepd.scope/job_7"
    write(tmp_path, cpuset__cpus__effective="0-1")
    write(job, memory__max="2097152", memory__current="1048576", cpu__max="max 100000")
    write(job / "step_0", cpu__max="50000 100000", memory__max="max")
    write(job / "step_0/task_0", cpuset__cpus__effective="0", cpu__stat="usage_usec 1500000\nx 1")
    membership = tmp_path / "membership"
    membership.write_text("0::/system.slice/slurmstepd.scope/job_7/step_0/task_0\n")
    assert find_limits(tmp_path, membership) == ((0,), 0.5, 2 << 20)
    assert memory_file(tmp_path, membership) == job / "memory.current"
    assert cpu_seconds(tmp_path, membership) == 1.5
    membership.write_text("0::/../../elsewhere\n")  # beyond this namespace: the root alone
    assert find_limits(tmp_path, membership).memory_bytes == psutil.virtual_memory().total


def test_version_1_has_a_folder_a_controller(tmp_path):
    write(tmp_path / "cpu/job", **{"cpu__cfs_quota_us": "25000", "cpu__cfs_period_us": "100000"})
    write(tmp_path / "memory/job", memory__limit_in_bytes="4096", memory__usage_in_bytes="9")
    write(tmp_path / "memory", memory__limit_in_bytes=str(1 << 62))
    write(tmp_path / "cpuacct/job", cpuacct__usage="2000000000")
    membership = tmp_path / "membership"
    membership.write_text("4:memory:/job\n2:cpu,cpuacct:/job\n1:cpuset:/\n")
    limits = find_limits(tmp_path, membership)
    assert limits.cpu_quota == 0.25 and limits.memory_bytes == 4096
    assert cpu_seconds(tmp_path, membership) == 2.0


def test_a_quota_is_what_use_is_measured_by(tmp_path, monkeypatch):
    """Half a core's worth of time, all of it used; without a quota nothing is added."""
    from tfbig.profiler import host_metrics

    spent = iter((10.0, 10.25))
    monkeypatch.setattr(host_metrics, "cpu_seconds", lambda: next(spent))
    moments = iter((100.0, 100.5))
    monkeypatch.setattr(host_metrics.time, "monotonic", lambda: next(moments))
    whole = find_limits(tmp_path, tmp_path / "none")
    metrics = HostMetrics(whole._replace(cpu_quota=0.5))
    sample = {metric[:3]: metric.value for metric in metrics.sample()}
    assert sample["cpu", "CPUQuotaUtilization", "quota"] == 100
    monkeypatch.undo()
    kinds = {metric.dimension for metric in HostMetrics(whole).sample()}
    assert "CPUUtilization" in kinds and "CPUQuotaUtilization" not in kinds


UUIDS = ("GPU-aa", "GPU-bb", "GPU-cc", "GPU-dd")


@pytest.mark.parametrize(
    "visible, num_processes, chosen",
    [
        (None, 1, [0, 1, 2, 3]),
        ("2,0", 1, [0, 2]),
        ("GPU-bb,3", 2, [1, 3]),
        ("1,9,2", 1, [1]),  # CUDA stops at the first that is none
        ("", 1, []),
        ("1", 4, [0, 1, 2, 3]),  # each of four processes was given one
        ("MIG-x", 1, [0, 1, 2, 3]),
    ],
)
def test_gpus_that_the_run_may_not_use_do_not_count(visible, num_processes, chosen):
    assert visible_gpus(UUIDS, visible, num_processes) == chosen


def test_local_sizes_by_launcher():
    launched = {"HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "4", "HOROVOD_CROSS_RANK": "0"}
    assert host_place(launched).local_size == 4 and host_place({}).local_size == 1


class NVMLError(Exception):
    pass


class FakeNvml(types.SimpleNamespace):
    """What nvidia-ml-py's module has of two GPUs, of which the second knows no power or energy."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM = 0, 1, 2
    NVML_GPM_METRICS_GET_VERSION = 1

    def __init__(self) -> None:
        super().__init__(freed=[], is_shut=False, gets=0)

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle}".encode()

    def nvmlDeviceGetName(self, handle):
        return b"NVIDIA H100"

    def nvmlDeviceGetUtilizationRates(self, handle):
        return types.SimpleNamespace(gpu=80 + handle)

    def nvmlDeviceGetMemoryInfo(self, handle):
        return types.SimpleNamespace(used=20 << 30, total=80 << 30)

    def nvmlDeviceGetPowerUsage(self, handle):
        if handle:
            raise NVMLError("not supported")
        return 350_000

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        return self.nvmlDeviceGetPowerUsage(handle) * 10

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return 61

    def nvmlDeviceGetClockInfo(self, handle, clock):
        return {1: 1980, 2: 2619}[clock]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return 0x1 if handle else 0x8  # idle; a hardware slowdown

    def nvmlGpmQueryDeviceSupport(self, handle):
        return types.SimpleNamespace(isSupportedDevice=not handle)

    def nvmlGpmSampleAlloc(self):
        return types.SimpleNamespace(at=0)

    def nvmlGpmSampleGet(self, handle, sample):
        self.gets += 1
        sample.at = self.gets

    def c_nvmlGpmMetricsGet_t(self):
        metrics = [types.SimpleNamespace(metricId=0, value=0.0) for _ in range(3)]
        return types.SimpleNamespace(metrics=metrics)

    def nvmlGpmMetricsGet(self, request):
        assert request.numMetrics == 3 and request.sample1.at < request.sample2.at
        for metric in request.metrics:
            metric.value = 10.0 * metric.metricId

    def nvmlGpmSampleFree(self, sample):
        self.freed.append(sample)

    def nvmlShutdown(self):
        self.is_shut = True


def test_gpus_are_sampled_and_what_one_does_not_know_is_left_out():
    nvml = FakeNvml()
    gpus = GpuMetrics(nvml)
    assert gpus.names() == ["NVIDIA H100"] * 2
    for _ in range(2):  # the second time between the two newest samples of its counters
        found = {metric[1:3]: metric.value for metric in gpus.sample()}
    first = {dimension: value for (dimension, name), value in found.items() if name == "gpu0"}
    assert first == {
        "GPUUtilization": 80,
        "GPUMemoryUtilization": 25,
        "PowerWatts": 350,
        "EnergyJoules": 3500,
        "TemperatureCelsius": 61,
        "SMClockMHz": 1980,
        "MemoryClockMHz": 2619,
        "Throttled": 1,
        "SMActivePercent": 20,
        "TensorActivePercent": 50,
        "DRAMActivePercent": 100,
    }
    second = {dimension: value for (dimension, name), value in found.items() if name == "gpu1"}
    assert second["GPUUtilization"] == 81 and second["Throttled"] == 0
    assert not {"PowerWatts", "EnergyJoules", "SMActivePercent"} & second.keys()
    gpus.close()
    assert len(nvml.freed) == 2 and nvml.is_shut
    hidden = GpuMetrics(FakeNvml(), "1", 1)
    assert {metric.name for metric in hidden.sample()} == {"gpu1"}
