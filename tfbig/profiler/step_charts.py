"""Steps over time, and how long they took."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from tfbig.profiler.chart import Chart, thin, to_datetimes
from tfbig.profiler.metrics_readers import TraceEvent

_NUM_BINS = 50
STEP = "Step:ModeKeys"
# smdebug's expressions name PyTorch's lanes; ours of the same meaning match too.
_SELECT = (STEP, "^Forward", "^Backward")


def durations_by_lane(
    events: Sequence[TraceEvent], select_metrics: Sequence[str], show_workers: bool
) -> dict[str, np.ndarray]:
    """Returns the milliseconds (n,) of events by lane, and by rank with `show_workers`."""
    found: dict[str, list[float]] = {}
    for event in events:
        if any(re.search(pattern, event.event_phase) for pattern in select_metrics):
            rank = event.event_args.get("rank", event.tid)
            lane = f"{event.event_phase}, rank {rank}" if show_workers else event.event_phase
            found.setdefault(lane, []).append(event.duration / 1e6)
    return {lane: np.array(values) for lane, values in found.items()}


class StepHistogram(Chart):
    """How long steps and passes took: 50 bins up to the median and two standard deviations.

    Args:
      metrics_reader: of the events.
      width: pixels.
    """

    def __init__(self, metrics_reader: Any, width: int = 500) -> None:
        super().__init__()
        self.metrics_reader, self.width = metrics_reader, width

    def plot(
        self,
        starttime: float = 0,
        endtime: float | None = None,
        select_metrics: Sequence[str] = _SELECT,
        show_workers: bool = True,
    ) -> None:
        """Draws the histograms.

        Args:
          starttime: microseconds since 1970.
          endtime: microseconds since 1970; None means the last event.
          select_metrics: regular expressions of lanes.
          show_workers: a histogram a rank.
        """
        self._start = starttime
        self.select_metrics, self.show_workers = select_metrics, show_workers
        self.update_data(float("inf") if endtime is None else endtime)

    def update_data(self, current_timestamp: float) -> None:
        """Draws anew up to a time, microseconds since 1970."""
        events = self.metrics_reader.get_events(self._start, current_timestamp)
        self.step_metrics = durations_by_lane(events, self.select_metrics, self.show_workers)
        self.figure = go.Figure()
        for lane, values in self.step_metrics.items():
            end = float(np.median(values) + 2 * values.std()) or 1.0
            bins = {"start": 0, "end": end, "size": end / _NUM_BINS}
            self.figure.add_histogram(x=values, xbins=bins, name=lane, opacity=0.6)
        self.figure.update_layout(
            barmode="overlay", width=self.width, xaxis_title="milliseconds", yaxis_title="count"
        )
        self.show()


class StepTimelineChart(Chart):
    """Milliseconds of each step over time, the first one of each process left out.

    Args:
      metrics_reader: of the events.
      width: pixels.
    """

    def __init__(self, metrics_reader: Any, width: int = 1000) -> None:
        super().__init__()
        self.metrics_reader, self.width = metrics_reader, width
        self.update_data(float("inf"))

    def update_data(self, current_timestamp: float) -> None:
        """Draws anew up to a time, microseconds since 1970."""
        events = self.metrics_reader.get_events(0, current_timestamp, event_type=STEP)
        self.figure = go.Figure()
        lanes: dict[str, list[TraceEvent]] = {}
        for event in events:
            lanes.setdefault(f"{event.event_phase}, rank {event.tid}", []).append(event)
        for lane, found in lanes.items():
            seen: set[str] = set()
            chosen = [e for e in found if e.node_id in seen or seen.add(e.node_id)]  # type: ignore[func-returns-value]
            starts = np.array([event.start_time / 1e9 for event in chosen])
            durations = np.array([event.duration / 1e6 for event in chosen])
            starts, durations = thin(starts, durations)
            self.figure.add_trace(
                go.Scattergl(x=to_datetimes(starts), y=durations, name=lane, mode="markers+lines")
            )
        self.figure.update_layout(width=self.width, yaxis_title="milliseconds")
        self.show()
