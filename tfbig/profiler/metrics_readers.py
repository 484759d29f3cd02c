"""Readers of a run's samples and events, with the methods that smdebug's readers have."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from tfbig.errors import UserError
from tfbig.profiler import layout
from tfbig.profiler.system_table import SystemTable, read_lines, read_system, sample_files
from tfbig.profiler.time_units import TimeUnits, to_seconds

_EVENT_FILE = re.compile(r"(\d+)_(.+?)_(\w*timeline)\.json(\.tmp)?")
_SLACK_SECONDS = 180.0  # a file's name says when its last event ended


class SystemEvent(NamedTuple):
    """One number of one sample."""

    type: str
    name: str
    dimension: str
    value: float
    node_id: str
    timestamp: float  # seconds since 1970


class TraceEvent(NamedTuple):
    """One event of one rank."""

    start_time: int  # nanoseconds since 1970
    duration: int
    event_name: str
    event_phase: str  # the lane it is drawn in
    event_args: dict[str, Any]
    node_id: str  # <process>-<host>
    pid: int
    tid: int  # the rank

    @property
    def end_time(self) -> int:
        """Nanoseconds since 1970."""
        return self.start_time + self.duration


class LocalSystemMetricsReader:
    """Reads the hosts' samples.

    Args:
      trace_root_folder: a run's profiler-output.
      use_in_memory_cache: taken for smdebug's sake; the files are read anew at each call.
    """

    def __init__(self, trace_root_folder: str | Path, use_in_memory_cache: bool = False) -> None:
        self.trace_root_folder = Path(trace_root_folder)
        self.refresh_event_file_list()

    def refresh_event_file_list(self) -> None:
        """Looks for new files."""
        self._files = sample_files(self.trace_root_folder)

    def get_timestamp_of_first_available_file(self) -> int:
        """Returns microseconds since 1970 at which the first minute began; 0 without files."""
        return self._files[0][0] * 1_000_000 if self._files else 0

    def get_timestamp_of_latest_available_file(self) -> int:
        """Returns microseconds since 1970 at which the last minute ends; 0 without files."""
        return (self._files[-1][0] + 60) * 1_000_000 if self._files else 0

    def get_events(
        self,
        start_time: float,
        end_time: float,
        unit: TimeUnits = TimeUnits.MICROSECONDS,
        event_type: str | None = None,
    ) -> list[SystemEvent]:
        """Returns the numbers of the samples of a time.

        Args:
          start_time: since 1970, in `unit`.
          end_time: since 1970, in `unit`.
          unit: of both times.
          event_type: cpu, gpu, memory, i/o, network or pressure; None means all.
        """
        start, end = to_seconds(start_time, unit), to_seconds(end_time, unit)
        self.refresh_event_file_list()
        events = []
        for minute, _, path in self._files:
            if minute + 60 < start or minute > end:
                continue
            for line in read_lines(path):
                wanted = event_type in (None, line["Type"])
                if wanted and start <= line["Timestamp"] <= end:
                    fields = ("Type", "Name", "Dimension", "Value", "NodeId", "Timestamp")
                    events.append(SystemEvent(*(line[field] for field in fields)))
        return events

    def tables(self, start: float = 0.0, end: float = float("inf")) -> list[SystemTable]:
        """Returns a table of samples a host, of [start, end] in microseconds since 1970."""
        return read_system(self.trace_root_folder, start / 1e6, end / 1e6)


class LocalAlgorithmMetricsReader:
    """Reads the ranks' events.

    Args:
      trace_root_folder: a run's profiler-output.
      use_in_memory_cache: taken for smdebug's sake; the files are read anew at each call.
      suffixes: endings of the files that count.
    """

    def __init__(
        self,
        trace_root_folder: str | Path,
        use_in_memory_cache: bool = False,
        suffixes: tuple[str, ...] = ("",),
    ) -> None:
        self.trace_root_folder, self._suffixes = Path(trace_root_folder), suffixes
        self.refresh_event_file_list()

    def refresh_event_file_list(self) -> None:
        """Looks for new files."""
        found = []
        for path in layout.events_dir(self.trace_root_folder).rglob("*timeline.json*"):
            match = _EVENT_FILE.fullmatch(path.name)
            if match and path.name.removesuffix(".tmp").endswith(self._suffixes):
                # A file that is being written is named by when it was begun.
                end = float("inf") if match[4] else int(match[1]) / 1e6
                found.append((end, match[2], path))
        self._files = sorted(found)

    def get_timestamp_of_first_available_file(self) -> int:
        """Returns microseconds since 1970 at which the first file's last event ended."""
        return self._stamps()[0] if self._files else 0

    def get_timestamp_of_latest_available_file(self) -> int:
        """Returns microseconds since 1970 at which the last event ended; 0 without files."""
        return self._stamps()[-1] if self._files else 0

    def get_events(
        self,
        start_time: float,
        end_time: float,
        unit: TimeUnits = TimeUnits.MICROSECONDS,
        event_type: str | None = None,
    ) -> list[TraceEvent]:
        """Returns the events of all ranks that ran within a time, by their start.

        Args:
          start_time: since 1970, in `unit`.
          end_time: since 1970, in `unit`.
          unit: of both times.
          event_type: regular expression of lanes; None means all.
        """
        start, end = to_seconds(start_time, unit), to_seconds(end_time, unit)
        self.refresh_event_file_list()
        events = [
            event
            for stamp, _, path in self._files
            if stamp >= start - _SLACK_SECONDS
            for event in read_trace(path)
            if event.end_time >= start * 1e9 and event.start_time <= end * 1e9
        ]
        if event_type is not None:
            events = [event for event in events if re.search(event_type, event.event_phase)]
        return sorted(events, key=lambda event: event.start_time)

    def get_events_by_step(self, start_step: int, end_step: int) -> list[TraceEvent]:
        """Returns the events of all ranks that belong to steps [start_step, end_step]."""
        return [
            event
            for event in self.get_events(0, float("inf"))
            if start_step <= int(event.event_args.get("step_num", -1)) <= end_step
        ]

    def _stamps(self) -> list[int]:
        ends = [int(end * 1e6) for end, _, _ in self._files if end != float("inf")]
        open_files = [path for end, _, path in self._files if end == float("inf")]
        for path in open_files:
            ends += [event.end_time // 1000 for event in read_trace(path)][-1:]
        return sorted(ends) or [0]


def read_trace(path: Path) -> Iterator[TraceEvent]:
    """Yields the complete events of a Chrome trace file, which may be in the middle of writing.

    Raises:
      UserError: when it is damaged elsewhere than at its end.
    """
    match = _EVENT_FILE.fullmatch(path.name)
    worker = match[2] if match else ""
    base, lanes = 0, {0: ""}
    for event in _load_trace(path):
        arguments = event.get("args", {})
        if event["ph"] == "M":
            base = arguments.get("start_time_since_epoch_in_micros", base)
            if event["name"] == "process_name" and "name" in arguments:
                lanes[event["pid"]] = arguments["name"]
        elif event["ph"] == "X":
            yield TraceEvent(
                (base + event["ts"]) * 1000,
                event["dur"] * 1000,
                event["name"],
                lanes.get(event["pid"], ""),
                arguments,
                worker,
                event["pid"],
                event.get("tid", 0),
            )


def _load_trace(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_bytes().strip()
    except FileNotFoundError:  # given its final name since
        return []
    if not text.endswith(b"]"):
        cut = text.rfind(b",\n")
        text = text[:cut] + b"]" if cut > 0 else b"[]"
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise UserError(f"{path} is not a trace ({error}); remove or mend it") from error
