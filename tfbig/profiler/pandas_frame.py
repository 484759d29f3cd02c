"""Samples and events as pandas frames; needs the extra `notebook`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tfbig.errors import UserError
from tfbig.profiler.frame_overlaps import relative, seconds_by_name
from tfbig.profiler.metrics_readers import (
    LocalAlgorithmMetricsReader,
    LocalSystemMetricsReader,
    TraceEvent,
)
from tfbig.profiler.time_units import TimeUnits

if TYPE_CHECKING:
    import pandas as pd

_DATA = "DataIterator"


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise UserError("PandasFrame needs pandas: pip install 'tfbig[notebook]'.") from None
    return pandas


def _nanoseconds(times: Sequence[Any]) -> np.ndarray:
    """Returns times, of any form that pandas knows, as (n,) nanoseconds since 1970."""
    found = _pandas().to_datetime(list(times), utc=True)
    return found.as_unit("ns").asi8


class PandasFrame:
    """Reads a run's measurements as frames.

    Args:
      path: a run's profiler-output, or the run's folder.
      use_in_memory_cache: taken for smdebug's sake.
      scan_interval: taken for smdebug's sake.
    """

    def __init__(
        self,
        path: str | Path,
        use_in_memory_cache: bool = False,
        scan_interval: int = 5_000_000_000,
    ) -> None:
        path = Path(path)
        path = path / "profiler-output" if (path / "profiler-output").is_dir() else path
        self.system_metrics_reader = LocalSystemMetricsReader(path)
        self.framework_metrics_reader = LocalAlgorithmMetricsReader(path)
        self._cached: tuple[Any, Any] | None = None
        self.start_time = self.system_metrics_reader.get_timestamp_of_first_available_file()

    def get_all_system_metrics(self, selected_system_metrics: Sequence[str] = ()) -> "pd.DataFrame":
        """Returns a row a number of a sample.

        Args:
          selected_system_metrics: names (cpu0) or dimensions that count; empty means all.
        """
        return self._system(0, float("inf"), selected_system_metrics)

    def get_all_framework_metrics(
        self, selected_framework_metrics: Sequence[str] = ()
    ) -> "pd.DataFrame":
        """Returns a row an event; `selected_framework_metrics` are names, empty means all."""
        events = self.framework_metrics_reader.get_events(0, float("inf"))
        return self._framework(events, selected_framework_metrics)

    def get_all_dataloader_metrics(
        self, selected_framework_metrics: Sequence[str] = ()
    ) -> "pd.DataFrame":
        """Returns a row a wait for a batch."""
        events = self.framework_metrics_reader.get_events(0, float("inf"), event_type=_DATA)
        return self._framework(events, selected_framework_metrics)

    def get_framework_metrics_by_timesteps(
        self, timestep_list: Sequence[Any] = (), selected_framework_metrics: Sequence[str] = ()
    ) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        """Returns what ran at given times, such as those of samples in which a core was full.

        Args:
          timestep_list: times, as the frames have them or in words; UTC.
          selected_framework_metrics: names or lanes of events; empty means all.

        Returns:
          By lane, relative to the longest; by name, in seconds; the steps by name, in seconds.
        """
        times = _nanoseconds(timestep_list)
        events = self._overlapping(times, times)
        intervals = np.stack([times, times], axis=1)
        lanes, names, steps = seconds_by_name(events, intervals, selected_framework_metrics)
        return relative(lanes), names, steps

    def get_framework_metrics_by_begin_and_end_timesteps(
        self,
        begin_timestep_list: Sequence[Any],
        end_timestep_list: Sequence[Any],
        selected_framework_metrics: Sequence[str] = (),
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Returns what ran in given times, such as outlying steps.

        Args:
          begin_timestep_list: times at which they began, as the frames have them; UTC.
          end_timestep_list: times at which they ended.
          selected_framework_metrics: names or lanes of events; empty means all.

        Returns:
          By lane and by name, each relative to the longest.
        """
        begins, ends = _nanoseconds(begin_timestep_list), _nanoseconds(end_timestep_list)
        events, intervals = self._overlapping(begins, ends), np.stack([begins, ends], axis=1)
        lanes, names, _ = seconds_by_name(events, intervals, selected_framework_metrics)
        return relative(lanes), relative(names)

    def _overlapping(self, begins: np.ndarray, ends: np.ndarray) -> list[TraceEvent]:
        if not len(begins):
            return []
        return self.framework_metrics_reader.get_events(
            float(begins.min()), float(ends.max()), unit=TimeUnits.NANOSECONDS
        )

    def get_profiler_data_by_time(
        self,
        start_time_us: float,
        end_time_us: float,
        cache_metrics: bool = False,
        selected_framework_metrics: Sequence[str] = (),
        selected_system_metrics: Sequence[str] = (),
        get_framework_metrics: bool = True,
        get_system_metrics: bool = True,
    ) -> tuple["pd.DataFrame", "pd.DataFrame"]:
        """Returns (samples, events) between two times.

        Args:
          start_time_us: microseconds since 1970.
          end_time_us: microseconds since 1970.
          cache_metrics: whether what earlier calls asked for is returned as well.
          selected_framework_metrics: names or lanes of events; empty means all.
          selected_system_metrics: names or dimensions of samples; empty means all.
          get_framework_metrics: whether events are read; else their frame is empty.
          get_system_metrics: whether samples are read; else their frame is empty.
        """
        events: list[TraceEvent] = []
        if get_framework_metrics:
            events = self.framework_metrics_reader.get_events(
                start_time_us, end_time_us, unit=TimeUnits.MICROSECONDS
            )
        end = end_time_us if get_system_metrics else start_time_us - 1
        system = self._system(start_time_us, end, selected_system_metrics)
        framework = self._framework(events, selected_framework_metrics)
        if not cache_metrics:
            return system, framework
        concat = _pandas().concat
        if self._cached is not None:
            system = concat([self._cached[0], system], ignore_index=True)
            framework = concat([self._cached[1], framework], ignore_index=True)
        self._cached = system, framework
        return self._cached

    def get_profiler_data_by_step(
        self, start_step: int, end_step: int, cache_metrics: bool = False
    ) -> tuple["pd.DataFrame", "pd.DataFrame"]:
        """Returns (samples, events) from the start of one step to the end of another."""
        events = self.framework_metrics_reader.get_events_by_step(start_step, end_step)
        if not events:
            return self._system(0, -1, ()), self._framework([], ())
        start, end = events[0].start_time, max(event.end_time for event in events)
        return self.get_profiler_data_by_time(start / 1000, end / 1000, cache_metrics)

    def _system(self, start: float, end: float, selected: Sequence[str]) -> "pd.DataFrame":
        columns = "timestamp timestamp_us value system_metric dimension nodeID type".split()
        rows = [
            (
                event.timestamp,
                round(event.timestamp * 1e6),
                event.value,
                event.name,
                event.dimension,
                event.node_id,
                event.type,
            )
            for event in self.system_metrics_reader.get_events(start, end)
            if not selected or event.name in selected or event.dimension in selected
        ]
        pandas = _pandas()
        frame = pandas.DataFrame(rows, columns=columns)
        frame["timestamp"] = pandas.to_datetime(frame["timestamp"], unit="s")
        return frame

    def _framework(self, events: Sequence[TraceEvent], selected: Sequence[str]) -> "pd.DataFrame":
        columns = (
            "start_time end_time start_time_us end_time_us tid pid framework_metric step bytes"
            " process nodeID"
        ).split()
        rows = [
            (
                event.start_time,
                event.end_time,
                event.start_time // 1000,
                event.end_time // 1000,
                event.tid,
                event.pid,
                event.event_name,
                int(event.event_args.get("step_num", -1)),
                event.event_args.get("bytes_fetched", -1),
                event.event_phase,
                event.node_id,
            )
            for event in events
            if not selected or event.event_name in selected or event.event_phase in selected
        ]
        pandas = _pandas()
        frame = pandas.DataFrame(rows, columns=columns)
        for name in ("start_time", "end_time"):
            frame[name] = pandas.to_datetime(frame[name], unit="ns")
        return frame
