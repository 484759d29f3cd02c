"""Memory of this machine that is free, and copies of a rank's state in it. TensorFlow-free."""

import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil

from tfbig.checkpoint_format import LazyArray, Slice, num_bytes_to_write

_GIB = 1024**3
_COPY_THREADS = 4  # one doesn't fill a memory bus
_CGROUP = Path("/sys/fs/cgroup")
# Variables that launchers set to the number of processes on this host.
_LOCAL_SIZES = ("HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def available_bytes() -> int:
    """Returns the memory that new arrays of this process's container could take."""
    available = psutil.virtual_memory().available
    try:  # of a container; pages of files that it has read can be dropped
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return min(available, limit - used + int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return available


def num_local_ranks() -> int:
    """Returns how many ranks of the job share this host, as far as the launcher says."""
    for name in _LOCAL_SIZES:
        if os.environ.get(name, "").isdigit():
            return max(1, int(os.environ[name]))
    return 1


def memory_problem(num_bytes: int) -> str | None:
    """Says that this host has no room for a copy on each of its ranks.

    Args:
        num_bytes: of this rank's copy.

    Returns:
        One line with the numbers, or None when there is room and a tenth to spare.
    """
    needed, available = num_bytes * num_local_ranks(), available_bytes()
    if needed * 1.1 <= available:
        return None
    return (
        f"a copy in host memory needs {needed / _GIB:.2f} GiB on this host and "
        f"{available / _GIB:.2f} GiB are available"
    )


class HostCopy:
    """A copy of what a rank writes, whose room is kept from one copy to the next."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []

    def problem(self, slices: Iterable[Slice]) -> str | None:
        """Says why `take` can't be called; None where it can."""
        return None if self._arrays else memory_problem(num_bytes_to_write(slices))

    def take(self, slices: Iterable[Slice]) -> list[Slice]:
        """Returns the slices with the values that they have now.

        Args:
            slices: as `Trainer.state_slices` gives them; only what this rank writes is copied.
                The copies hold until the next call.
        """
        old, self._arrays, copied = self._arrays, [], []
        copies: deque[Future] = deque()
        with ThreadPoolExecutor(_COPY_THREADS) as pool:
            for part in slices:
                if not part.is_writer:  # whose shape alone is asked
                    array = LazyArray(part.rectangle.shape, part.dtype, _never)
                    copied.append(part._replace(array=array))
                    continue
                values = np.asarray(part.array)
                room = self._room(values, old)
                copies.append(pool.submit(np.copyto, room, values))
                copied.append(part._replace(array=room))
                if len(copies) > _COPY_THREADS:  # what a device gave is held only so long
                    copies.popleft().result()
            for copy in copies:
                copy.result()
        return copied

    def _room(self, values: np.ndarray, old: list[np.ndarray]) -> np.ndarray:
        number = len(self._arrays)
        room = old[number] if number < len(old) else None
        if room is None or (room.shape, room.dtype) != (values.shape, values.dtype):
            room = np.empty(values.shape, values.dtype)
        self._arrays.append(room)
        return room


def _never() -> np.ndarray:
    raise AssertionError("a slice that another rank writes was read")
