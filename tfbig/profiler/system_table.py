"""Reads hosts' samples: all of them, or their quantiles by minute where a run is long."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from tfbig.errors import UserError

Column = tuple[str, str, str]  # type, dimension, name
_MOST_BYTES = 120 << 20  # of samples that are read one by one
# Of a minute's quantiles: where they stand, and at which points its samples are made up again.
_LEVELS = {"min": 0, "p5": 5, "p50": 50, "p95": 95, "max": 100}
_MADE_UP = np.arange(2.5, 100, 5)


class SystemTable(NamedTuple):
    """Samples of one host."""

    node_id: str
    times: np.ndarray  # (n,) seconds since 1970, ascending
    columns: tuple[Column, ...]
    values: np.ndarray  # (n, columns) float32; NaN where a sample lacks a column
    by_minute: bool  # whether a row is a minute's median
    counts: np.ndarray | None = None  # (n,) samples of each minute
    statistics: Mapping[str, np.ndarray] | None = None  # of each minute: (n, columns) by name

    def of(
        self, type: str, dimension: str | None = None, statistic: str | None = None
    ) -> np.ndarray:
        """Returns the values (n, names) of a type of metric, and a dimension of it.

        Args:
          type: of the metric.
          dimension: of it; None means all.
          statistic: of each minute, where a row is one (min, p5, p50, p95, max, mean); None means
            the median. A single sample is all of them.
        """
        chosen = [
            i
            for i, column in enumerate(self.columns)
            if column[0] == type and dimension in (None, column[1])
        ]
        if statistic is not None and self.statistics is not None:
            return self.statistics[statistic][:, chosen]
        return self.values[:, chosen]

    @property
    def num_samples(self) -> int:
        """How many samples the rows stand for."""
        return len(self.times) if self.counts is None else int(self.counts.sum())

    @property
    def samples_a_row(self) -> float:
        """How many samples a row stands for, in the mean."""
        return self.num_samples / len(self.times) if len(self.times) else 1.0

    def last(self, num_samples: float) -> "SystemTable":
        """Returns the rows that hold the last `num_samples` samples."""
        counts = np.ones(len(self.times)) if self.counts is None else self.counts
        after = counts[::-1].cumsum()[::-1] - counts  # samples behind each row
        return self._rows(after < num_samples)

    def percentiles(self, type: str, dimension: str, levels: Sequence[float]) -> np.ndarray:
        """Returns the percentiles (levels, names) over all samples.

        Of minutes, each minute's samples are made up again from its five quantiles: what goes up
        and down within a minute counts.
        """
        found = self.of(type, dimension)
        if self.statistics is not None and len(self.times):
            kept = np.stack([self.of(type, dimension, name) for name in _LEVELS])
            found = _made_up(kept).reshape(-1, found.shape[1])
        if not found.size:
            return np.full([len(levels), found.shape[1]], np.nan)
        return np.nanpercentile(found, levels, axis=0)

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
        return self._rows((self.times >= start) & (self.times <= stop))

    def _rows(self, chosen: np.ndarray) -> "SystemTable":
        return self._replace(
            times=self.times[chosen],
            values=self.values[chosen],
            counts=None if self.counts is None else self.counts[chosen],
            statistics=self.statistics
            and {name: values[chosen] for name, values in self.statistics.items()},
        )


def _made_up(quantiles: np.ndarray) -> np.ndarray:
    """Returns samples (points, n, names) with the given quantiles (5, n, names)."""
    levels = np.array(list(_LEVELS.values()), float)
    right = np.clip(np.searchsorted(levels, _MADE_UP), 1, len(levels) - 1)
    share = (_MADE_UP - levels[right - 1]) / (levels[right] - levels[right - 1])
    share = share[:, None, None]
    return (1 - share) * quantiles[right - 1] + share * quantiles[right]


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
      most_bytes: files of samples that are larger in all are not read: then the minutes' quantiles
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
        names: list[str] = []
        times, counts, rows = [], [], []
        for line in read_lines(path):
            if "columns" in line:
                columns = [(type, dimension, name) for type, dimension, name in line["columns"]]
                names = line["statistics"]
            else:
                times.append(line["time"])
                counts.append(line["samples"])
                rows.append(np.array(line["values"], np.float32))  # (statistics, columns so far)
        values = np.full([len(names), len(rows), len(columns)], np.nan, np.float32)
        for index, row in enumerate(rows):
            values[:, index, : row.shape[1]] = row
        statistics = dict(zip(names, values, strict=True))
        yield SystemTable(
            path.stem,
            np.array(times),
            tuple(columns),
            statistics.get("p50", np.zeros([0, len(columns)], np.float32)),
            True,
            np.array(counts, np.int64),
            statistics,
        )
