"""Memory of this machine that is free, and copies of a rank's state in it. TensorFlow-free."""

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import psutil

from tfbig.checkpoint_format import LazyArray, Slice, num_bytes_to_write

_GIB = 1024**3
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
    """A copy of what a rank writes, made in two steps of which only the first is waited for.

    What TensorFlow has read of a variable never changes: where the variable is updated while
    somebody holds the value, the update makes a copy first. On a CPU, reading copies nothing. So
    `look` costs next to no time, and `take` may run beside the next step's passes; an update that
    overtakes it makes the copy itself.

    Args:
        keeps_room: whether the copies' memory is kept from one save to the next, as new memory
            costs more time than the copy. Not where looking already copies, from a GPU.
    """

    def __init__(self, keeps_room: bool = True) -> None:
        self._keeps_room = keeps_room
        self._arrays: list[np.ndarray] = []

    def problem(self, slices: Iterable[Slice]) -> str | None:
        """Says why there is no room for a copy; None where there is."""
        return None if self._arrays else memory_problem(num_bytes_to_write(slices))

    def look(self, slices: Iterable[Slice]) -> list[Slice]:
        """Returns the slices with the values that they have now; for the training thread.

        Args:
            slices: as `Trainer.state_slices` gives them; only what this rank writes is read.
        """
        seen = []
        for part in slices:
            values: LazyArray | np.ndarray
            if not part.is_writer:  # whose shape alone is asked
                values = LazyArray(part.rectangle.shape, part.dtype, _never)
            elif isinstance(part.array, LazyArray):
                values = np.asarray(part.array)
            else:
                values = np.array(part.array)
            seen.append(part._replace(array=values))
        return seen

    def take(self, seen: list[Slice]) -> list[Slice]:
        """Returns copies that hold until the next call; for any thread.

        Args:
            seen: of `look`; emptied, so that each value is let go as soon as it has been copied.
        """
        if not self._keeps_room:
            return seen
        old, self._arrays, copied = self._arrays, [], []
        seen.reverse()
        while seen:
            part = seen.pop()
            if part.is_writer:
                part = part._replace(array=self._copy(part.array, old))
            copied.append(part)
        return copied

    def _copy(self, values: np.ndarray, old: list[np.ndarray]) -> np.ndarray:
        number = len(self._arrays)
        room = old[number] if number < len(old) else None
        if room is None or (room.shape, room.dtype) != (values.shape, values.dtype):
            room = np.empty(values.shape, values.dtype)
        np.copyto(room, values)
        self._arrays.append(room)
        return room


def _never() -> np.ndarray:
    raise AssertionError("a slice that another rank writes was read")
