"""What the system lets a process have: open files, locked memory, processes. TensorFlow-free."""

import resource
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tfbig.diagnosis.finding import Examined, Level
from tfbig.profiler.cgroup_limits import find_limits

_GIB = 1 << 30
_MIN_FILES, _GOOD_FILES = 1024, 4096
_MIN_PROCESSES = 4096
_UNLIMITED = resource.RLIM_INFINITY


def examine(
    read_limit: Callable[[int], tuple[int, int]] = resource.getrlimit,
    has_infiniband: bool | None = None,
    package: Path = Path(__file__),
) -> Examined:
    """Returns which limits are too low for a run.

    Args:
      read_limit: as resource.getrlimit.
      has_infiniband: None looks.
      package: a file of tfbig; a clock that shows an earlier time than the file has is wrong.
    """
    found = Examined()
    files, most = read_limit(resource.RLIMIT_NOFILE)
    text = f"{_count(files)} open files"
    if files != _UNLIMITED and files < _GOOD_FILES:
        level: Level = "problem" if files < _MIN_FILES else "warning"
        found.add("limits", level, f"{text} (at most {_count(most)})", "ulimit -n 65536")
    else:
        found.add("limits", "fine", text)
    processes, _ = read_limit(resource.RLIMIT_NPROC)
    if processes != _UNLIMITED and processes < _MIN_PROCESSES:
        text = f"{processes} processes and threads of this user"
        found.add("limits", "warning", text, "ulimit -u unlimited")
    if has_infiniband is None:
        has_infiniband = any(Path("/sys/class/infiniband").glob("*"))
    locked, _ = read_limit(resource.RLIMIT_MEMLOCK)
    if has_infiniband and locked != _UNLIMITED:
        text = f"{locked >> 10} KiB of locked memory, which InfiniBand needs without limit"
        advice = "ulimit -l unlimited; docker run --ulimit memlock=-1 --cap-add=IPC_LOCK"
        found.add("limits", "problem", text, advice)
    _look_at_memory(found)
    if time.time() < package.stat().st_mtime - 86400:
        text = f"the clock shows {time.strftime('%Y-%m-%d')}, before tfbig was installed"
        found.add("limits", "problem", text, "set the clock, e.g. by chrony or systemd-timesyncd")
    return found


def _count(number: int) -> str:
    return "unlimited" if number == _UNLIMITED else str(number)


def _look_at_memory(found: Examined) -> None:
    limit, there = find_limits().memory_bytes, psutil.virtual_memory()
    text = f"{limit / _GIB:.1f} GiB of memory, {min(limit, there.available) / _GIB:.1f} available"
    if limit < there.total:
        text += f" (the container's limit; the host has {there.total / _GIB:.1f})"
    found.add("limits", "fine", text)
