"""A row a core, GPU and host; colour is use."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from tfbig.profiler.chart import TOTAL, Chart, Series, choose, series_of, to_datetimes

_LAST_SAMPLES = 1000


class Heatmap(Chart):
    """Use of cores and GPUs over time.

    Args:
      metrics_reader: of the samples.
      select_metrics: taken for smdebug's sake, where it chooses nothing; the two below choose.
      starttime: microseconds since 1970; 0 means the first sample.
      endtime: microseconds since 1970; None means the last sample.
      select_dimensions: regular expressions.
      select_events: regular expressions of names such as cpu0.
      plot_height: pixels.
      show_workers: rows of each host; otherwise only each host's mean.
    """

    def __init__(
        self,
        metrics_reader: Any,
        select_metrics: Sequence[str] = (),
        starttime: float = 0,
        endtime: float | None = None,
        select_dimensions: Sequence[str] = (".*CPU", ".*GPU"),
        select_events: Sequence[str] = (".*",),
        plot_height: int = 350,
        show_workers: bool = True,
    ) -> None:
        super().__init__()
        self.metrics_reader, self.plot_height = metrics_reader, plot_height
        self.select_dimensions, self.select_events = select_dimensions, select_events
        self.show_workers, self._start = show_workers, starttime
        self.update_data(float("inf") if endtime is None else endtime)

    def update_data(self, current_timestamp: float) -> None:
        """Draws anew up to a time, microseconds since 1970."""
        found = series_of(self.metrics_reader.tables(self._start, current_timestamp))
        chosen = choose(found, self.select_dimensions, self.select_events)
        if not self.show_workers:
            chosen = [one for one in chosen if one.event == TOTAL]
        self.figure = heatmap_of(chosen, self.plot_height)
        self.show()


def heatmap_of(found: Sequence[Series], height: int = 350) -> go.Figure:
    """Returns a heatmap of series, a row each, of the last 1000 samples.

    Args:
      found: what to draw; hosts may have been sampled at other times and for longer.
      height: pixels, at least.
    """
    times = np.unique(np.concatenate([one.times for one in found])) if found else np.zeros(0)
    if len(times) > _LAST_SAMPLES and found:
        longest = max((one.times for one in found), key=len)
        times = longest[-_LAST_SAMPLES:]
    rows = [_at(one, times) for one in found]
    labels = [f"{one.node_id} {one.dimension} {one.event}" for one in found]
    figure = go.Figure(
        go.Heatmap(
            z=np.array(rows).reshape(len(found), len(times)),
            x=to_datetimes(times),
            y=labels,
            zmin=0,
            zmax=100,
            colorscale="Viridis",
            colorbar_title="%",
        )
    )
    return figure.update_layout(height=max(height, 60 + 16 * len(found)))


def _at(one: Series, times: np.ndarray) -> np.ndarray:
    """Returns a series' newest value at each time, NaN before its first."""
    places = np.searchsorted(one.times, times, side="right") - 1
    values = one.values[np.maximum(places, 0)] if len(one.values) else np.full(len(times), np.nan)
    return np.where(places >= 0, values, np.nan)
