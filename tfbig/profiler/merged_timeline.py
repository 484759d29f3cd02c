"""All ranks' events, and hosts' metrics as counters, in one Chrome trace."""

import enum
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from tfbig.errors import UserError
from tfbig.profiler.metrics_readers import LocalAlgorithmMetricsReader, TraceEvent
from tfbig.profiler.system_table import SystemTable, read_system
from tfbig.profiler.time_units import TimeUnits

_COUNTERS = {"lowcpu": ("cpu", "CPUUtilization"), "lowgpu": ("gpu", "GPUUtilization")}


class MergeUnit(enum.Enum):
    """What start and end of a merged timeline count."""

    TIME = "time"
    STEP = "step"


class MergedTimeline:
    """Merges the traces of all ranks, which are on one clock already.

    Args:
      path: a run's profiler-output.
      file_suffix_filter: endings of the files that count, e.g. ["pythontimeline.json"]; None: all.
      output_directory: where the merged file goes; None means `path`.
    """

    def __init__(
        self,
        path: str | Path,
        file_suffix_filter: Sequence[str] | None = None,
        output_directory: str | Path | None = None,
    ) -> None:
        self._reader = LocalAlgorithmMetricsReader(
            path, suffixes=tuple(file_suffix_filter or ("",))
        )
        self._path = Path(path)
        self._output = Path(output_directory or path)

    def merge_timeline(
        self,
        start: float = 0,
        end: float = float("inf"),
        unit: MergeUnit | str = MergeUnit.TIME,
        sys_metrics_filter: Mapping[str, Sequence[float]] = {"lowgpu": ()},
    ) -> str:
        """Writes the events of a part of the run.

        Args:
          start: microseconds since 1970, or a step.
          end: microseconds since 1970, or a step.
          unit: which of both, also as "time" or "step".
          sys_metrics_filter: "lowgpu" and "lowcpu", each with the percent below which a host's
            mean is drawn as a counter; () draws all.

        Returns:
          The file's path; Perfetto and chrome://tracing open it.

        Raises:
          UserError: no event lies in that part, or there is no such unit.
        """
        try:
            unit = MergeUnit(unit)
        except ValueError:
            raise UserError(f"unit={unit!r}: write MergeUnit.TIME or MergeUnit.STEP.") from None
        if unit is MergeUnit.STEP:
            events = self._reader.get_events_by_step(int(start), int(end))
        else:
            events = self._reader.get_events(start, end, unit=TimeUnits.MICROSECONDS)
        if not events:
            raise UserError(f"{self._path} has no events between {unit.value} {start} and {end}.")
        base = events[0].start_time
        last = max(event.end_time for event in events)
        lanes = {name: i for i, name in enumerate(dict.fromkeys(e.event_phase for e in events), 1)}
        records = [*_names(lanes, events, base), *(_event(e, lanes, base) for e in events)]
        for table in read_system(self._path, base / 1e9, last / 1e9):
            records += _counters(table, sys_metrics_filter, base, len(lanes) + 1)
        path = self._output / f"{round(time.time() * 1e6)}_merged_timeline.json"
        path.write_bytes(
            b"[\n"
            + b",\n".join(orjson.dumps(r, option=orjson.OPT_SERIALIZE_NUMPY) for r in records)
            + b"\n]\n"
        )
        return str(path)


def _names(lanes: Mapping[str, int], events: Sequence[TraceEvent], base: int) -> list[Any]:
    start = {"start_time_since_epoch_in_micros": base // 1000}
    records: list[Any] = [{"name": "process_name", "ph": "M", "pid": 0, "args": start}]
    for name, number in lanes.items():
        records.append({"name": "process_name", "ph": "M", "pid": number, "args": {"name": name}})
    for phase, rank in dict.fromkeys((event.event_phase, event.tid) for event in events):
        thread = {"name": f"rank {rank}"}
        records.append(
            {"name": "thread_name", "ph": "M", "pid": lanes[phase], "tid": rank, "args": thread}
        )
    return records


def _event(event: TraceEvent, lanes: Mapping[str, int], base: int) -> dict[str, Any]:
    return {
        "name": event.event_name,
        "ph": "X",
        "pid": lanes[event.event_phase],
        "tid": event.tid,
        "ts": (event.start_time - base) / 1000,
        "dur": event.duration / 1000,
        "args": event.event_args,
    }


def _counters(
    table: SystemTable, wanted: Mapping[str, Sequence[float]], base: int, pid: int
) -> list[Any]:
    records = []
    for word, limit in wanted.items():
        values = table.of(*_COUNTERS[word]) if word in _COUNTERS else table.values[:, :0]
        if not values.shape[1]:
            continue
        most = limit[0] if limit else float("inf")
        for at, value in zip(table.times, values.mean(axis=1), strict=True):
            if value <= most:
                name = f"{_COUNTERS[word][1]} {table.node_id}"
                stamp = (at * 1e9 - base) / 1000
                records.append(
                    {"name": name, "ph": "C", "pid": pid, "ts": stamp, "args": {"%": float(value)}}
                )
    return records
