"""Samples and events as pandas frames, and statistics of them; needs the extra `notebook`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfbig.errors import UserError
from tfbig.profiler.metrics_readers import (
    LocalAlgorithmMetricsReader,
    LocalSystemMetricsReader,
    TraceEvent,
)
from tfbig.profiler.time_units import TimeUnits

if TYPE_CHECKING:
    import pandas as pd

_TRAIN = "Step:ModeKeys.TRAIN"
_DATA = "DataIterator"


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise UserError("PandasFrame needs pandas: pip install 'tfbig[notebook]'.") from None
    return pandas


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

    def get_profiler_data_by_time(
        self, start_time_us: float, end_time_us: float, cache_metrics: bool = False, **_: Any
    ) -> tuple["pd.DataFrame", "pd.DataFrame"]:
        """Returns (samples, events) between two times, microseconds since 1970."""
        events = self.framework_metrics_reader.get_events(
            start_time_us, end_time_us, unit=TimeUnits.MICROSECONDS
        )
        return self._system(start_time_us, end_time_us, ()), self._framework(events, ())

    def get_profiler_data_by_step(
        self, start_step: int, end_step: int, cache_metrics: bool = False
    ) -> tuple["pd.DataFrame", "pd.DataFrame"]:
        """Returns (samples, events) from the start of one step to the end of another."""
        events = self.framework_metrics_reader.get_events_by_step(start_step, end_step)
        if not events:
            return self._system(0, -1, ()), self._framework([], ())
        start, end = events[0].start_time, max(event.end_time for event in events)
        return self.get_profiler_data_by_time(start / 1000, end / 1000)

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
            if not selected or event.event_name in selected
        ]
        pandas = _pandas()
        frame = pandas.DataFrame(rows, columns=columns)
        for name in ("start_time", "end_time"):
            frame[name] = pandas.to_datetime(frame[name], unit="ns")
        return frame


class PandasFrameAnalysis:
    """Statistics of a run's frames.

    Args:
      system_df: of PandasFrame.
      framework_df: of PandasFrame.
    """

    def __init__(self, system_df: "pd.DataFrame", framework_df: "pd.DataFrame") -> None:
        self.sys_metrics_df, self.framework_metrics_df = system_df, framework_df

    def get_job_statistics(self) -> dict[str, Any]:
        """Returns times of the job and of its training, evaluation and the rest, in seconds."""
        events = self.framework_metrics_df
        steps = events[events["framework_metric"] == _TRAIN]
        start, end = events["start_time_us"].min() / 1e6, events["end_time_us"].max() / 1e6
        first, last = steps["start_time_us"].min() / 1e6, steps["end_time_us"].max() / 1e6
        return {
            "start_time": start,
            "end_time": end,
            "job_duration": end - start,
            "training_loop_start": first,
            "training_loop_end": last,
            "training_loop_duration": last - first,
            "initialization": first - start,
            "finalization": end - last,
        }

    def get_step_statistics(self, by: str = "framework_metric") -> "pd.DataFrame":
        """Returns the distribution of events' milliseconds by a column, e.g. process or nodeID."""
        events = self.framework_metrics_df
        milliseconds = (events["end_time_us"] - events["start_time_us"]) / 1e3
        return milliseconds.groupby(events[by]).describe(percentiles=[0.5, 0.95, 0.99])

    def get_utilization_stats(
        self, resource: str | None = None, by: str | None = None
    ) -> "pd.DataFrame":
        """Returns the distribution of hosts' metrics.

        Args:
          resource: a type such as cpu; None means all.
          by: one more column, e.g. system_metric.
        """
        samples = self.sys_metrics_df
        if resource is not None:
            samples = samples[samples["type"] == resource]
        keys = ["type", "dimension", "nodeID", *([by] if by else [])]
        return samples.groupby(keys)["value"].describe(percentiles=[0.5, 0.95, 0.99])

    def get_device_usage_stats(
        self,
        device: str = "cpu",
        utilization_ranges: Sequence[tuple[float, float]] = ((90, 100), (10, 90), (0, 10)),
    ) -> "pd.DataFrame":
        """Returns the share of samples within ranges of use, by host.

        Args:
          device: cpu or gpu.
          utilization_ranges: percent, from above the first number to the second.
        """
        samples = self.sys_metrics_df
        chosen = samples["dimension"].isin([f"{device.upper()}Utilization"])
        groups = samples[chosen].groupby("nodeID")["value"]
        return _pandas().DataFrame(
            {
                f"{low}-{high}": groups.apply(
                    lambda values, low=low, high=high: (
                        ((values > low) | ((low == 0) & (values == 0))) & (values <= high)
                    ).mean()
                )
                for low, high in utilization_ranges
            }
        )

    def get_training_phase_intervals(self, phase: str = _TRAIN) -> "pd.DataFrame":
        """Returns start and end, in microseconds since 1970, of each step's lane by rank."""
        events = self.framework_metrics_df
        chosen = events[events["process"] == phase]
        return chosen.groupby(["nodeID", "tid"]).agg(
            start=("start_time_us", "min"), end=("end_time_us", "max"), steps=("step", "count")
        )
