"""What the charts share: series chosen by regular expression, and figures that are shown once."""

import datetime
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go

from tfbig.profiler.system_table import SystemTable

TOTAL = "total"
_MOST_POINTS = 20_000  # of one line: more are thinned to the lowest and the highest of each bin


class Series(NamedTuple):
    """One line of a chart."""

    dimension: str
    event: str
    node_id: str
    times: np.ndarray  # seconds since 1970
    values: np.ndarray


def series_of(tables: Iterable[SystemTable]) -> list[Series]:
    """Returns every metric of every host, and each dimension's mean over names as "total".

    smdebug leaves the dimension of memory and disk metrics empty, where units differ: there each
    name counts as a dimension of its own, so that nothing is averaged over units.
    """
    found = []
    for table in tables:
        by_dimension: dict[str, list[int]] = {}
        for index, (_, dimension, name) in enumerate(table.columns):
            by_dimension.setdefault(dimension or name, []).append(index)
        for dimension, chosen in by_dimension.items():
            for index in chosen:
                name = table.columns[index][2]
                found.append(
                    Series(dimension, name, table.node_id, table.times, table.values[:, index])
                )
            known = ~np.isnan(table.values[:, chosen]).all(axis=1)
            mean = np.nanmean(table.values[known][:, chosen], axis=1)
            found.append(Series(dimension, TOTAL, table.node_id, table.times[known], mean))
    return found


def choose(
    found: Iterable[Series], select_dimensions: Sequence[str], select_events: Sequence[str]
) -> list[Series]:
    """Returns the series whose dimension and name match one of the regular expressions each."""

    def matches(patterns: Sequence[str], text: str) -> bool:
        return any(re.search(pattern, text) for pattern in patterns)

    return [
        one
        for one in found
        if matches(select_dimensions, one.dimension) and matches(select_events, one.event)
    ]


def merge_hosts(found: Sequence[Series]) -> list[Series]:
    """Returns one series a dimension and name: all hosts' samples, in the order of time."""
    merged: dict[tuple[str, str], list[Series]] = {}
    for one in found:
        merged.setdefault((one.dimension, one.event), []).append(one)
    result = []
    for (dimension, event), parts in merged.items():
        times = np.concatenate([part.times for part in parts])
        values = np.concatenate([part.values for part in parts])
        order = np.argsort(times, kind="stable")
        result.append(Series(dimension, event, "all", times[order], values[order]))
    return result


def thin(times: np.ndarray, values: np.ndarray, most: int = _MOST_POINTS) -> tuple[Any, Any]:
    """Returns at most `most` points: the lowest and highest of equal bins, in order."""
    if len(times) <= most:
        return times, values
    bins = np.array_split(np.arange(len(times)), most // 2)
    filled = np.where(np.isnan(values), np.nanmedian(values), values)
    chosen = sorted({int(b[f(filled[b])]) for b in bins for f in (np.argmin, np.argmax)})
    return times[chosen], values[chosen]


def to_datetimes(times: Iterable[float]) -> list[datetime.datetime]:
    """Returns seconds since 1970 as UTC times, which plotly draws without a zone."""
    utc = datetime.timezone.utc
    return [datetime.datetime.fromtimestamp(float(t), utc).replace(tzinfo=None) for t in times]


def is_percent(dimension: str) -> bool:
    """Whether values of a dimension lie between 0 and 100."""
    return any(word in dimension for word in ("Utilization", "Percent"))


class Chart:
    """A figure, shown when a notebook runs; `figure` is plotly's.

    Attributes:
      figure: to save, change or show again.
    """

    def __init__(self) -> None:
        self.figure = go.Figure()
        self._handle: Any = None

    def show(self) -> None:
        """Shows the figure in a notebook, or replaces it where it stands; nothing elsewhere."""
        try:
            from IPython import get_ipython
            from IPython.display import display
        except ImportError:
            return
        if get_ipython() is None:
            return
        if self._handle is None:
            self._handle = display(self.figure, display_id=True)
        else:
            self._handle.update(self.figure)
