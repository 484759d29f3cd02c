"""What a container, or a job of a cluster, may use of its host: the limits of its cgroups."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

CGROUP = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")  # docs.kernel.org/admin-guide/cgroup-v2.html, "Processes"
_UNLIMITED = 1 << 60  # cgroup v1 says "no limit" by a number near 2^63


class Limits(NamedTuple):
    """What a container may use of its host."""

    cores: tuple[int, ...]  # numbers of the cores it may run on
    cpu_quota: float  # cores' worth of time; the number of cores where there is no quota
    memory_bytes: int  # the host's memory where there is no limit


def read_text(path: Path) -> str:
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


def _own_path(controller: str, membership: Path) -> str:
    """Returns where this process's group lies below the controller's root, "" where unknown."""
    for line in read_text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path
    return ""


def folders(
    controller: str, cgroup: Path = CGROUP, membership: Path = _MEMBERSHIP
) -> Iterator[Path]:
    """Yields the folders whose limits hold for this process, its own group's first.

    Slurm and systemd set limits deep below the root, in groups that this process sees whole; a
    container mostly sees its own group as the root.

    Args:
      controller: of version 1, e.g. memory; "" is version 2, which has them all in one folder.
      cgroup: where they are mounted.
      membership: of this process.
    """
    root = cgroup / controller
    own = root / _own_path(controller, membership).lstrip("/")
    if ".." not in own.parts:  # a group outside the namespace is not to be seen
        while own != root and root in own.parents:
            yield own
            own = own.parent
    yield root


def _first(name: str, controller: str, cgroup: Path, membership: Path) -> str:
    found = (read_text(folder / name) for folder in folders(controller, cgroup, membership))
    return next((text for text in found if text), "")


def _quotas(cgroup: Path, membership: Path) -> Iterator[float]:
    """Yields the cores' worth of time that each group above this process may use."""
    texts = [read_text(folder / "cpu.max") for folder in folders("", cgroup, membership)]
    for folder in folders("cpu", cgroup, membership):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        texts.append(" ".join(read_text(folder / name) for name in names))
    for text in texts:
        words = text.split()
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
            yield int(words[0]) / int(words[1])


def _memory_limits(cgroup: Path, membership: Path) -> Iterator[tuple[int, Path]]:
    """Yields (bytes, file of what is used) of each group above this process with a limit."""
    for controller, limit, used in (
        ("", "memory.max", "memory.current"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        for folder in folders(controller, cgroup, membership):
            text = read_text(folder / limit)
            if text.isdigit() and int(text) < _UNLIMITED:
                yield int(text), folder / used


def find_limits(cgroup: Path = CGROUP, membership: Path = _MEMBERSHIP) -> Limits:
    """Returns the limits of this process's container or job, of either version of cgroups."""
    known = range(psutil.cpu_count() or 1)
    cpuset = _first("cpuset.cpus.effective", "", cgroup, membership)
    cpuset = cpuset or _first("cpuset.cpus", "cpuset", cgroup, membership)
    cores = tuple(core for core in parse_cores(cpuset) if core in known) or tuple(known)
    share = min([float(len(cores)), *_quotas(cgroup, membership)])
    total = psutil.virtual_memory().total
    memory = min([total, *(limit for limit, _ in _memory_limits(cgroup, membership))])
    return Limits(cores, share, memory)


def memory_file(cgroup: Path = CGROUP, membership: Path = _MEMBERSHIP) -> Path | None:
    """Returns the file of what the group with the lowest limit uses; None without a limit."""
    limits = [one for one in _memory_limits(cgroup, membership) if one[1].exists()]
    return min(limits)[1] if limits else None


def cpu_seconds(cgroup: Path = CGROUP, membership: Path = _MEMBERSHIP) -> float | None:
    """Returns the time that this process's group has spent on cores; None where nothing says."""
    for line in _first("cpu.stat", "", cgroup, membership).splitlines():
        name, _, value = line.partition(" ")
        if name == "usage_usec":
            return int(value) / 1e6
    nanoseconds = _first("cpuacct.usage", "cpuacct", cgroup, membership)
    return int(nanoseconds) / 1e9 if nanoseconds.isdigit() else None
