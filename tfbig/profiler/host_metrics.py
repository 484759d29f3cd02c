"""What a Linux host does: cores, memory, disks, network, pressure; within a container's limits."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from tfbig.profiler.cgroup_limits import Limits, cpu_seconds, memory_file, read_text

_PRESSURE = Path("/proc/pressure")  # docs.kernel.org/accounting/psi.html
_POWER = Path("/sys/class/powercap")


class Metric(NamedTuple):
    """One measured number, in smdebug's terms."""

    type: str
    dimension: str
    name: str
    value: float


class HostMetrics:
    """Reads a host's counters; each sample says what happened since the one before.

    Args:
      limits: of the container.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        below = limits.memory_bytes < psutil.virtual_memory().total
        self._cgroup_memory = memory_file() if below else None
        # Where a quota leaves less time than the cores have, their use says little: other
        # containers' is in it, and this one's is never full.
        self._has_quota = limits.cpu_quota < len(limits.cores)
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
        self._spent = cpu_seconds() if self._has_quota else None

    def sample(self) -> list[Metric]:
        """Returns what was measured since the last call."""
        now = time.monotonic()
        seconds, self._time = max(now - self._time, 1e-6), now
        quota = self._quota_use(seconds)
        return [*self._core_metrics(), *quota, self._memory(), *self._rates(seconds)]

    def _quota_use(self, seconds: float) -> list[Metric]:
        """Returns the percent of its quota that the container used; [] where it has none."""
        if self._spent is None or (spent := cpu_seconds()) is None:
            return []
        before, self._spent = self._spent, spent
        percent = 100 * (spent - before) / (seconds * self._limits.cpu_quota)
        return [Metric("cpu", "CPUQuotaUtilization", "quota", min(100.0, max(0.0, percent)))]

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
        if self._cgroup_memory is not None and (text := read_text(self._cgroup_memory)).isdigit():
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
            if (text := read_text(path)).isdigit():
                counters["power", "PowerWatts", name] = int(text) / 1e6  # joules
        for kind, path in self._pressure_files:
            for line in read_text(path).splitlines():
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
