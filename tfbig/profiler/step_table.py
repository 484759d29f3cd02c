"""One row a step and rank, of fixed size: what reports of long runs on many ranks read."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from tfbig.durable_file import write_all, write_atomic
from tfbig.profiler import layout

AXES = ("data", "pipeline", "tensor", "other")
# Seconds, but for `start` (seconds since 1970 on rank 0's clock), `step` and the memory. NaN where
# a strategy doesn't measure.
COLUMNS = [
    ("start", "<f8"),
    ("step", "<u4"),
    ("seconds", "<f4"),
    ("data_wait", "<f4"),
    *((axis, "<f4") for axis in AXES),
    ("forward", "<f4"),
    ("backward", "<f4"),
    ("bubble", "<f4"),
    ("resident_megabytes", "<f4"),
]
ROW = np.dtype(COLUMNS)


class StepTableWriter:
    """Appends a rank's rows; a torn last row of a crash is cut off.

    Args:
      profiler_dir: of the run.
      rank: of this process.
      description: what else is known of the rank, for its JSON file.
    """

    def __init__(self, profiler_dir: Path, rank: int, description: Mapping[str, Any]) -> None:
        path = layout.rank_path(profiler_dir, "steps", rank, ".bin")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        os.ftruncate(
            self._descriptor, os.fstat(self._descriptor).st_size // ROW.itemsize * ROW.itemsize
        )
        record = {"rank": rank, "columns": COLUMNS, **description}
        write_atomic(path.with_suffix(".json"), orjson.dumps(record, option=orjson.OPT_INDENT_2))

    def write(self, values: Mapping[str, float]) -> None:
        """Appends one row.

        Args:
          values: by column; those left out are NaN.
        """
        row = np.zeros([], ROW)
        for name, _ in COLUMNS:
            row[name] = values.get(name, np.nan)
        write_all(self._descriptor, row.tobytes())

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)


def ranks_with_steps(profiler_dir: Path) -> list[int]:
    """Returns the ranks that wrote a table."""
    found = (profiler_dir / "steps").glob("rank-*.bin")
    return sorted(int(path.stem.removeprefix("rank-")) for path in found)


def read_steps(profiler_dir: Path, rank: int) -> np.ndarray:
    """Returns a rank's rows (n,) of type ROW by step; of a step done twice the last holds."""
    path = layout.rank_path(profiler_dir, "steps", rank, ".bin")
    count = path.stat().st_size // ROW.itemsize
    if not count:
        return np.zeros([0], ROW)
    rows = np.fromfile(path, ROW, count)
    if (np.diff(rows["step"].astype(np.int64)) > 0).all():
        return rows
    _, last = np.unique(rows["step"][::-1], return_index=True)
    return rows[::-1][last]


def describe_rank(profiler_dir: Path, rank: int) -> dict[str, Any]:
    """Returns what a rank said of itself: host, process, and its clock's offset and error."""
    path = layout.rank_path(profiler_dir, "steps", rank, ".json")
    return orjson.loads(path.read_bytes()) if path.exists() else {"rank": rank}
