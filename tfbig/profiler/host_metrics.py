"""What a Linux host does: cores, memory, disks, network, pressure; within a container's limits."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

_PRESSURE = Path("/proc/pressure")  # docs.kernel.org/accounting/psi.html
_POWER = Path("/sys/class/powercap")
_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # cgroup v1 says "no limit" by a number near 2^63


class Metric(NamedTuple):
    """One measured number, in smdebug's terms."""

    type: str
    dimension: str
    name: str
    value: float


class Limits(NamedTuple):
    """What a container may use of its host."""

    cores: tuple[int, ...]  # numbers of the cores it may run on
    cpu_quota: float  # cores' worth of time; the number of cores where there is no quota
    memory_bytes: int  # the host's memory where there is no limit


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def parse_cores(text: str) -> tuple[int, ...]:
    """Returns the cores of a cpuset.

    >>> parse_cores("0-2,5")
    (0, 1, 2, 5)
    """
    cores: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return tuple(cores)


def find_limits(cgroup: Path = _CGROUP) -> Limits:
    """Returns the limits of this process's container, of either version of cgroups."""
    known = range(psutil.cpu_count() or 1)
    cpuset = _read(cgroup / "cpuset.cpus.effective") or _read(cgroup / "cpuset/cpuset.cpus")
    cores = tuple(core for core in parse_cores(cpuset) if core in known) or tuple(known)
    quota, period = (_read(cgroup / "cpu.max").split() or ["", ""])[:2]
    if not quota:
        quota = _read(cgroup / "cpu/cpu.cfs_quota_us")
        period = _read(cgroup / "cpu/cpu.cfs_period_us")
    share = float(len(cores))
    if quota.isdigit() and period.isdigit() and int(period):
        share = min(share, int(quota) / int(period))
    limit = _read(cgroup / "memory.max") or _read(cgroup / "memory/memory.limit_in_bytes")
    total = psutil.virtual_memory().total
    limited = limit.isdigit() and int(limit) < min(total, _UNLIMITED)
    return Limits(cores, share, int(limit) if limited else total)


class HostMetrics:
    """Reads a host's counters; each sample says what happened since the one before.

    Args:
      limits: of the container.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._cgroup_memory = next(
            (
                path
                for path in (
                    _CGROUP / "memory.current",
                    _CGROUP / "memory/memory.usage_in_bytes",
                )
                if limits.memory_bytes < psutil.virtual_memory().total and path.exists()
            ),
            None,
        )
        self._pressure_files = [
            (kind, path) for kind in ("cpu", "io", "memory") if (path := _PRESSURE / kind).exists()
        ]
        # Intel's and AMD's energy counters; newer kernels show them to root only.
        self._energy_files = {
            path.parent.name: path
            for path in sorted(_POWER.glob("intel-rapl:[0-9]/energy_uj"))
            if os.access(path, os.R_OK)
        }
        self._time = time.monotonic()
        self._cores = self._core_times()
        self._counters = self._read_counters()

    def sample(self) -> list[Metric]:
        """Returns what was measured since the last call."""
        now = time.monotonic()
        seconds, self._time = max(now - self._time, 1e-6), now
        return [*self._core_metrics(), self._memory(), *self._rates(seconds)]

    def _core_times(self) -> dict[int, tuple[float, float, float]]:
        """Returns (all, idle, waiting for I/O) seconds by core."""
        times = {}
        for core, spent in enumerate(psutil.cpu_times(percpu=True)):
            if core in self._limits.cores:
                # Guest time is part of user time already.
                total = sum(spent) - getattr(spent, "guest", 0) - getattr(spent, "guest_nice", 0)
                iowait, steal = getattr(spent, "iowait", 0.0), getattr(spent, "steal", 0.0)
                times[core] = (total, spent.idle + steal, iowait)
        return times

    def _core_metrics(self) -> Iterator[Metric]:
        before, self._cores = self._cores, self._core_times()
        for core, (total, idle, iowait) in self._cores.items():
            old_total, old_idle, old_iowait = before.get(core, (0.0, 0.0, 0.0))
            spent = total - old_total
            waited = min(max(iowait - old_iowait, 0.0), spent)
            rested = min(max(idle - old_idle, 0.0), spent - waited)
            busy = 100 * (spent - waited - rested) / spent if spent > 0 else 0.0
            yield Metric("cpu", "CPUUtilization", f"cpu{core}", busy)
            yield Metric(
                "cpu", "I/OWaitPercentage", f"cpu{core}", 100 * waited / spent if spent > 0 else 0.0
            )

    def _memory(self) -> Metric:
        memory = psutil.virtual_memory()
        percent = memory.percent
        if self._cgroup_memory is not None and (text := _read(self._cgroup_memory)).isdigit():
            percent = max(percent, 100 * int(text) / self._limits.memory_bytes)
        return Metric("memory", "", "MemoryUsedPercent", percent)

    def _read_counters(self) -> dict[tuple[str, str, str], float]:
        """Returns counters that only grow, by the metric that their growth a second is."""
        counters: dict[tuple[str, str, str], float] = {}
        disk = psutil.disk_io_counters()
        if disk is not None:
            counters["i/o", "", "IOPS"] = disk.read_count + disk.write_count
            counters["i/o", "", "ReadThroughputInBytesPerSecond"] = disk.read_bytes
            counters["i/o", "", "WriteThroughputInBytesPerSecond"] = disk.write_bytes
        cards = [
            count for name, count in psutil.net_io_counters(pernic=True).items() if name != "lo"
        ]
        counters["network", "Algorithm", "ReceiveBytesPerSecond"] = sum(c.bytes_recv for c in cards)
        counters["network", "Algorithm", "TransmitBytesPerSecond"] = sum(
            c.bytes_sent for c in cards
        )
        for name, path in self._energy_files.items():
            if (text := _read(path)).isdigit():
                counters["power", "PowerWatts", name] = int(text) / 1e6  # joules
        for kind, path in self._pressure_files:
            for line in _read(path).splitlines():
                words = line.split()
                stalled = float(words[-1].partition("=")[2])  # microseconds in all
                # Microseconds a second are percent times 10,000.
                counters["pressure", "PressurePercent", f"{kind}_{words[0]}"] = stalled / 1e4
        return counters

    def _rates(self, seconds: float) -> Iterator[Metric]:
        before, self._counters = self._counters, self._read_counters()
        for key, value in self._counters.items():
            rate = max(0.0, value - before.get(key, value)) / seconds
            # The kernel brings stalls up to date now and then: one sample may get two's.
            yield Metric(*key, min(rate, 100.0) if key[0] == "pressure" else rate)


def resident_bytes() -> int:
    """Returns the memory that this process holds now, 0 where /proc doesn't say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
