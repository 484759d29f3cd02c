"""How often a host's metric had which value."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from tfbig.profiler.chart import Chart, choose, is_percent, merge_hosts, series_of

_COLUMNS = 3


class MetricsHistogram(Chart):
    """Histograms of hosts' metrics, 2% wide where they are percent.

    Args:
      metrics_reader: of the samples.
    """

    def __init__(self, metrics_reader: Any) -> None:
        super().__init__()
        self.metrics_reader = metrics_reader

    def plot(
        self,
        starttime: float = 0,
        endtime: float | None = None,
        select_dimensions: Sequence[str] = (".*",),
        select_events: Sequence[str] = (".*",),
        show_workers: bool = True,
    ) -> None:
        """Draws the histograms; arguments as TimelineCharts has them."""
        self._start = starttime
        self.select_dimensions, self.select_events = select_dimensions, select_events
        self.show_workers = show_workers
        self.update_data(float("inf") if endtime is None else endtime)

    def clear(self) -> None:
        """Forgets what was drawn."""
        self.figure, self._handle = go.Figure(), None

    def update_data(self, current_timestamp: float) -> None:
        """Draws anew up to a time, microseconds since 1970."""
        found = series_of(self.metrics_reader.tables(self._start, current_timestamp))
        found = found if self.show_workers else merge_hosts(found)
        chosen = choose(found, self.select_dimensions, self.select_events)
        rows = max(1, -(-len(chosen) // _COLUMNS))
        titles = [f"{one.dimension} {one.event} {one.node_id}" for one in chosen]
        self.figure = make_subplots(rows=rows, cols=_COLUMNS, subplot_titles=titles)
        for index, one in enumerate(chosen):
            values = one.values[~np.isnan(one.values)]
            bins = {"start": 0, "end": 100.001, "size": 2} if is_percent(one.dimension) else None
            histogram = go.Histogram(
                x=values, xbins=bins, nbinsx=50, histnorm="probability", name=titles[index]
            )
            row, column = divmod(index, _COLUMNS)
            self.figure.add_trace(histogram, row=row + 1, col=column + 1)
        self.figure.update_layout(height=260 * rows, showlegend=False)
        self.show()
