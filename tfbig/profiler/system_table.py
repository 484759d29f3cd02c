"""Reads hosts' samples: all of them, or their quantiles by minute where a run is long."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from tfbig.errors import UserError

Column = tuple[str, str, str]  # type, dimension, name
_MOST_BYTES = 120 << 20  # of samples that are read one by one


class SystemTable(NamedTuple):
    """Samples of one host."""

    node_id: str
    times: np.ndarray  # (n,) seconds since 1970, ascending
    columns: tuple[Column, ...]
    values: np.ndarray  # (n, columns) float32; NaN where a sample lacks a column
    by_minute: bool  # whether a row is a minute's median

    def of(self, type: str, dimension: str | None = None) -> np.ndarray:
        """Returns the values (n, names) of a type of metric, and a dimension of it."""
        chosen = [
            i
            for i, column in enumerate(self.columns)
            if column[0] == type and dimension in (None, column[1])
        ]
        return self.values[:, chosen]

    def names(self, type: str, dimension: str) -> list[str]:
        """Returns the names that `of` has columns of."""
        return [name for kind, found, name in self.columns if (kind, found) == (type, dimension)]

    def one(self, type: str, dimension: str, name: str) -> np.ndarray:
        """Returns the values (n,) of one column; NaN where there is none."""
        key = (type, dimension, name)
        if key not in self.columns:
            return np.full(len(self.times), np.nan, np.float32)
        return self.values[:, self.columns.index(key)]

    def between(self, start: float, stop: float) -> "SystemTable":
        """Returns the samples of [start, stop], seconds since 1970."""
        inside = (self.times >= start) & (self.times <= stop)
        return self._replace(times=self.times[inside], values=self.values[inside])


def sample_files(profiler_dir: Path) -> list[tuple[int, str, Path]]:
    """Returns (seconds at which its minute began, host, path) of each file of samples, in order."""
    found = []
    for path in profiler_dir.glob("system/incremental/*/*.json"):
        minute, _, node_id = path.name.removesuffix(".json").partition(".")
        if minute.isdigit() and node_id:
            found.append((int(minute), node_id, path))
    return sorted(found)


def read_lines(path: Path) -> list[Any]:
    """Returns a JSON lines file's values; a last line that is being written is left out.

    Raises:
      UserError: when another line is damaged.
    """
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1].rstrip(b"\n")
    if not whole:
        return []
    try:
        return orjson.loads(b"[" + whole.replace(b"\n", b",") + b"]")
    except orjson.JSONDecodeError:
        pass
    lines = whole.split(b"\n")
    values = []
    for number, line in enumerate(lines, 1):
        try:
            values.append(orjson.loads(line))
        except orjson.JSONDecodeError as error:
            if number < len(lines):
                raise UserError(
                    f"{path}, line {number}, is not JSON ({error}); mend or remove that line"
                ) from error
    return values


def read_system(
    profiler_dir: Path,
    start: float = 0.0,
    stop: float = float("inf"),
    most_bytes: int = _MOST_BYTES,
) -> list[SystemTable]:
    """Returns each host's samples of [start, stop].

    Args:
      profiler_dir: of a run.
      start: seconds since 1970.
      stop: seconds since 1970.
      most_bytes: files of samples that are larger in all are not read: then the minutes' medians
        stand for the samples.
    """
    files = [file for file in sample_files(profiler_dir) if start - 60 <= file[0] <= stop]
    if sum(path.stat().st_size for _, _, path in files) > most_bytes:
        tables = list(_read_minutes(profiler_dir))
    else:
        tables = list(_read_samples(files))
    return [table.between(start, stop) for table in tables]


def _read_samples(files: Sequence[tuple[int, str, Path]]) -> Iterator[SystemTable]:
    for node_id in dict.fromkeys(node for _, node, _ in files):
        times: dict[float, int] = {}
        columns: dict[Column, int] = {}
        cells: list[tuple[int, int, float]] = []
        for _, _, path in (file for file in files if file[1] == node_id):
            for line in read_lines(path):
                row = times.setdefault(line["Timestamp"], len(times))
                key = (line["Type"], line["Dimension"], line["Name"])
                cells.append((row, columns.setdefault(key, len(columns)), line["Value"]))
        values = np.full([len(times), len(columns)], np.nan, np.float32)
        if cells:
            rows, places, numbers = zip(*cells, strict=True)
            values[list(rows), list(places)] = numbers
        stamps = np.fromiter(times, float, len(times))
        order = np.argsort(stamps, kind="stable")
        yield SystemTable(node_id, stamps[order], tuple(columns), values[order], False)


def _read_minutes(profiler_dir: Path) -> Iterator[SystemTable]:
    for path in sorted(profiler_dir.glob("minutes/*.jsonl")):
        columns: list[Column] = []
        median, times, rows = 0, [], []
        for line in read_lines(path):
            if "columns" in line:
                columns = [(type, dimension, name) for type, dimension, name in line["columns"]]
                median = line["statistics"].index("p50")
            else:
                times.append(line["time"])
                rows.append(np.array(line["values"][median], np.float32))
        values = np.full([len(rows), len(columns)], np.nan, np.float32)
        for index, row in enumerate(rows):
            values[index, : len(row)] = row
        yield SystemTable(path.stem, np.array(times), tuple(columns), values, True)
