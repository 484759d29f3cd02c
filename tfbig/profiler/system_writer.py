"""Writes a host's samples: smdebug's JSON lines, and quantiles by minute for long runs."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import orjson

from tfbig.profiler import layout
from tfbig.profiler.host_metrics import Metric

SECONDS_PER_FILE = 60
STATISTICS = ("min", "p5", "p50", "p95", "max", "mean")
_Column = tuple[str, str, str]


def statistics_of(values: np.ndarray) -> np.ndarray:
    """Returns STATISTICS of each column.

    Args:
      values: (n, columns), NaN where a sample lacks the column.

    Returns:
      (6, columns); NaN for a column without any value.
    """
    known = ~np.isnan(values).all(axis=0)
    result = np.full([len(STATISTICS), values.shape[1]], np.nan)
    if known.any():
        chosen = values[:, known]  # (n, known columns)
        result[:5, known] = np.nanpercentile(chosen, [0, 5, 50, 95, 100], axis=0)
        result[5, known] = np.nanmean(chosen, axis=0)
    return result


class SystemWriter:
    """Appends samples of one host.

    Args:
      profiler_dir: of the run.
      node_id: of the host.
    """

    def __init__(self, profiler_dir: Path, node_id: str) -> None:
        self._profiler_dir, self._node_id = profiler_dir, node_id
        self._minutes_path = layout.minutes_path(profiler_dir, node_id)
        self._minutes_path.parent.mkdir(parents=True, exist_ok=True)
        self._file: io.BufferedWriter | None = None
        self._minute = 0
        self._samples: list[tuple[float, dict[_Column, float]]] = []
        self._columns: list[_Column] = []

    def write(self, timestamp: float, metrics: Sequence[Metric]) -> None:
        """Appends one sample.

        Args:
          timestamp: seconds since 1970.
          metrics: of the sample.
        """
        minute = int(timestamp // SECONDS_PER_FILE) * SECONDS_PER_FILE
        if self._file is None or minute != self._minute:
            self.close()
            self._open(minute)
        assert self._file is not None
        stamp = round(timestamp, 6)
        lines = [
            orjson.dumps(
                {
                    "Type": metric.type,
                    "Name": metric.name,
                    "Dimension": metric.dimension,
                    "Value": round(metric.value, 2),
                    "NodeId": self._node_id,
                    "Timestamp": stamp,
                }
            )
            for metric in metrics
        ]
        self._file.write(b"\n".join(lines) + b"\n")
        self._file.flush()
        self._samples.append((timestamp, {metric[:3]: metric.value for metric in metrics}))

    def close(self) -> None:
        """Ends the minute: closes its file and appends its quantiles."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._samples:
            self._write_quantiles()
            self._samples = []

    def _open(self, minute: int) -> None:
        path = layout.system_path(self._profiler_dir, self._node_id, minute)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._minute = open(path, "ab"), minute

    def _write_quantiles(self) -> None:
        present = dict.fromkeys(key for _, sample in self._samples for key in sample)
        lines = b""
        if any(key not in self._columns for key in present):
            self._columns += [key for key in present if key not in self._columns]
            header = {"columns": self._columns, "statistics": STATISTICS}
            lines += orjson.dumps(header) + b"\n"
        nan = float("nan")
        values = np.array(
            [[sample.get(key, nan) for key in self._columns] for _, sample in self._samples]
        )  # (samples, columns)
        times = [time for time, _ in self._samples]
        record = {
            "time": round(sum(times) / len(times), 3),
            "samples": len(times),
            "values": np.round(statistics_of(values), 2).tolist(),
        }
        with open(self._minutes_path, "ab") as file:
            file.write(lines + orjson.dumps(record) + b"\n")
