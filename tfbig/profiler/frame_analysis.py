"""Statistics of a run's frames; needs the extra `notebook`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfbig.profiler.stats_kinds import Resource, StatsBy, types_of

if TYPE_CHECKING:
    import pandas as pd

_TRAIN = "Step:ModeKeys.TRAIN"
_PHASE = "Step:ModeKeys"


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

    def get_step_statistics(self, by: StatsBy | str = StatsBy.TRAINING_PHASE) -> "pd.DataFrame":
        """Returns the distribution of events' milliseconds.

        Args:
          by: training phases alone, names of events (FRAMEWORK_METRICS), lanes (PROCESS), or one
            more column of the frame, e.g. nodeID.
        """
        events, column = self.framework_metrics_df, by.value if isinstance(by, StatsBy) else by
        if column == StatsBy.TRAINING_PHASE.value:
            events = events[events["framework_metric"].str.startswith(_PHASE)]
            column = "framework_metric"
        milliseconds = (events["end_time_us"] - events["start_time_us"]) / 1e3
        return milliseconds.groupby(events[column]).describe(percentiles=[0.5, 0.95, 0.99])

    def get_utilization_stats(
        self,
        resource: Resource | str | list[Any] | None = None,
        by: StatsBy | str | None = None,
        phase: str | Sequence[str] | None = None,
    ) -> "pd.DataFrame":
        """Returns the distribution of hosts' metrics.

        Args:
          resource: one, or a list of them; None means all types.
          by: TRAINING_PHASE, or one more column, e.g. system_metric.
          phase: names of phases that count with TRAINING_PHASE; None means all.
        """
        samples, types = self.sys_metrics_df, types_of(resource)
        if types is not None:
            samples = samples[samples["type"].isin(types)]
        keys = ["type", "dimension", "nodeID"]
        if by in (StatsBy.TRAINING_PHASE, StatsBy.TRAINING_PHASE.value):
            samples = samples.assign(training_phase=self._phase_of(samples, phase))
            samples, keys = samples[samples["training_phase"] != ""], [*keys, "training_phase"]
        elif by is not None:
            keys.append(by.value if isinstance(by, StatsBy) else by)
        return samples.groupby(keys)["value"].describe(percentiles=[0.5, 0.95, 0.99])

    def _phase_of(self, samples: "pd.DataFrame", phase: str | Sequence[str] | None) -> np.ndarray:
        """Returns the phase within whose intervals each sample lies, "" where in none."""
        times, found = samples["timestamp_us"].to_numpy(), np.full(len(samples), "", object)
        for name, events in self._phases(phase):
            order = events.sort_values("start_time_us")
            starts = order["start_time_us"].to_numpy()
            ends = np.maximum.accumulate(order["end_time_us"].to_numpy())
            places = np.searchsorted(starts, times, side="right") - 1
            found[(places >= 0) & (times <= ends[np.maximum(places, 0)])] = name
        return found

    def _phases(self, phase: str | Sequence[str] | None) -> Any:
        """Returns pairs of a phase's name and its events."""
        events = self.framework_metrics_df
        events = events[events["process"].str.startswith(_PHASE)]
        if phase is not None:
            events = events[events["process"].isin([phase] if isinstance(phase, str) else phase)]
        return events.groupby("process")

    def get_device_usage_stats(
        self,
        device: Resource | str | list[Any] | None = None,
        utilization_ranges: Sequence[tuple[float, float]] = ((90, 100), (10, 90), (0, 10)),
    ) -> "pd.DataFrame":
        """Returns the share of samples within ranges of use, by host.

        Args:
          device: cpu, gpu or both; None means both.
          utilization_ranges: percent, from above the first number to the second.
        """
        samples = self.sys_metrics_df
        types = types_of(device) or ["cpu", "gpu"]
        chosen = samples["dimension"].isin([f"{name.upper()}Utilization" for name in types])
        groups = samples[chosen].groupby(["type", "nodeID"])["value"]
        import pandas

        return pandas.DataFrame(
            {
                f"{low}-{high}": groups.apply(
                    lambda values, low=low, high=high: (
                        ((values > low) | ((low == 0) & (values == 0))) & (values <= high)
                    ).mean()
                )
                for low, high in utilization_ranges
            }
        )

    def get_training_phase_intervals(
        self, phase: str | Sequence[str] | None = _TRAIN
    ) -> "pd.DataFrame":
        """Returns start and end, in microseconds since 1970, of each step's lane by rank.

        Args:
          phase: one name, or several; None means all phases.
        """
        events = self.framework_metrics_df
        wanted = [name for name, _ in self._phases(phase)]
        chosen = events[events["process"].isin(wanted)]
        return chosen.groupby(["nodeID", "tid"]).agg(
            start=("start_time_us", "min"), end=("end_time_us", "max"), steps=("step", "count")
        )
