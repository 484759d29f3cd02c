"""Linked timelines of hosts' metrics, and what ran in a chosen part of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from tfbig.profiler.chart import (
    TOTAL,
    Chart,
    Series,
    choose,
    is_percent,
    merge_hosts,
    series_of,
    thin,
    to_datetimes,
)
from tfbig.profiler.metrics_readers import TraceEvent
from tfbig.profiler.time_units import TimeUnits

_PANEL_HEIGHT = 200
_MOST_EVENTS = 2000


class TimelineCharts(Chart):
    """One line plot a dimension and name, with linked time axes.

    Args:
      system_metrics_reader: of the samples.
      framework_metrics_reader: of the events; may be None where no events are looked at.
      starttime: microseconds since 1970; 0 means the first sample.
      endtime: microseconds since 1970; None means the last sample.
      select_dimensions: regular expressions; memory and disk metrics count by their names.
      select_events: regular expressions of names such as cpu0; "total" is the mean over them.
      x: samples that are in view at first.
      show_workers: a line a host; otherwise all hosts' samples make one line.
    """

    def __init__(
        self,
        system_metrics_reader: Any,
        framework_metrics_reader: Any,
        starttime: float = 0,
        endtime: float | None = None,
        select_dimensions: Sequence[str] = (".*",),
        select_events: Sequence[str] = (".*",),
        x: int = 1000,
        show_workers: bool = True,
    ) -> None:
        super().__init__()
        self.system_metrics_reader = system_metrics_reader
        self.framework_metrics_reader = framework_metrics_reader
        self.select_dimensions, self.select_events = select_dimensions, select_events
        self.show_workers, self._width, self._start = show_workers, x, starttime
        self._read(float("inf") if endtime is None else endtime)
        self._draw()
        self.show()

    def update_data(self, current_timestamp: float) -> None:
        """Draws anew up to a time, microseconds since 1970."""
        self._read(current_timestamp)
        self._draw()
        self.show()

    def find_time_annotations(self, indexes: Sequence[int]) -> dict[str, float]:
        """Prints and returns the seconds that events took between two samples.

        Args:
          indexes: of samples; the first and the last count.

        Returns:
          Seconds by event and step, of the parts within that time, summed over ranks.
        """
        if not len(indexes):
            print("No selection made")
            return {}
        start, stop = self._times_of(indexes)
        print(f"Selected timerange: {start} to {stop}")
        seconds: dict[str, float] = {}
        for event in self._events(start, stop):
            step = event.event_args.get("step_num")
            key = event.event_name if step is None else f"{event.event_name}_{step}"
            inside = min(event.end_time / 1e9, stop) - max(event.start_time / 1e9, start)
            seconds[key] = seconds.get(key, 0.0) + inside
        for key, spent in seconds.items():
            print(f"Spent {1000 * spent:.3f} ms (cumulative time) in {key}")
        return seconds

    def plot_detailed_profiler_data(self, indexes: Sequence[int]) -> go.Figure | None:
        """Draws the events between two samples, a lane a kind and rank.

        Args:
          indexes: of samples; the first and the last count.
        """
        if not len(indexes):
            print("No selection made")
            return None
        start, stop = self._times_of(indexes)
        events = self._events(start, stop)
        if len(events) > _MOST_EVENTS:
            print(f"{len(events)} events: the first {_MOST_EVENTS} are drawn")
        figure = go.Figure()
        for phase in dict.fromkeys(event.event_phase for event in events[:_MOST_EVENTS]):
            chosen = [event for event in events[:_MOST_EVENTS] if event.event_phase == phase]
            figure.add_bar(
                name=phase,
                orientation="h",
                y=[f"{phase}, rank {event.tid}" for event in chosen],
                base=[event.start_time / 1e9 - start for event in chosen],
                x=[event.duration / 1e9 for event in chosen],
                hovertext=[f"step {event.event_args.get('step_num', '-')}" for event in chosen],
            )
        figure.update_layout(barmode="overlay", xaxis_title="seconds", showlegend=False)
        chart = Chart()
        chart.figure = figure
        chart.show()
        return figure

    def _read(self, end: float) -> None:
        found = series_of(self.system_metrics_reader.tables(self._start, end))
        self._all = found if self.show_workers else merge_hosts(found)
        self.series = choose(self._all, self.select_dimensions, self.select_events)

    def _draw(self) -> None:
        panels: dict[tuple[str, str], list[Series]] = {}
        for one in self.series:
            panels.setdefault((one.dimension, one.event), []).append(one)
        self.figure = make_subplots(
            rows=max(1, len(panels)),
            cols=1,
            shared_xaxes=True,
            vertical_spacing=0.3 / max(1, len(panels)),
            subplot_titles=[f"{dimension} {event}" for dimension, event in panels],
        )
        for row, ((dimension, event), lines) in enumerate(panels.items(), 1):
            for line in lines:
                times, values = thin(line.times, line.values)
                name = f"{dimension}-nodeid:{line.node_id} {event}"
                self.figure.add_trace(
                    go.Scattergl(x=to_datetimes(times), y=values, name=name), row=row, col=1
                )
            if is_percent(dimension):
                self.figure.update_yaxes(range=[0, 102], row=row, col=1)
        longest = max((line.times for line in self.series), key=len, default=np.zeros(0))
        if len(longest) > self._width:
            view = to_datetimes([longest[-self._width], longest[-1]])
            self.figure.update_xaxes(range=view)
        height = max(300, _PANEL_HEIGHT * len(panels))
        self.figure.update_layout(height=height, showlegend=False, hovermode="x")

    def _times_of(self, indexes: Sequence[int]) -> tuple[float, float]:
        """Returns the times of two samples, by the CPUs' line."""
        lines = [s for s in self._all if s.dimension == "CPUUtilization" and s.event == TOTAL]
        lines = lines or self._all
        times = lines[0].times
        last = len(times) - 1
        return float(times[min(min(indexes), last)]), float(times[min(max(indexes), last)])

    def _events(self, start: float, stop: float) -> list[TraceEvent]:
        return self.framework_metrics_reader.get_events(start, stop, unit=TimeUnits.SECONDS)
