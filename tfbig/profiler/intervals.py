"""Lengths of unions of intervals; what a step's split is made of."""

from collections.abc import Mapping

import numpy as np


def union_length(intervals: np.ndarray) -> float:
    """Returns how much is covered by at least one interval.

    Args:
      intervals: (n, 2) starts and stops.

    >>> union_length(np.array([[0.0, 2.0], [1.0, 3.0], [5.0, 6.0]]))
    4.0
    """
    if not len(intervals):
        return 0.0
    order = np.argsort(intervals[:, 0], kind="stable")
    starts, stops = intervals[order, 0], intervals[order, 1]
    reached = np.maximum.accumulate(stops)
    before = np.concatenate([[starts[0]], reached[:-1]])
    return float(np.maximum(0.0, stops - np.maximum(starts, before)).sum())


def clip(intervals: np.ndarray, start: float, stop: float) -> np.ndarray:
    """Returns the parts (m, 2) of intervals (n, 2) within [start, stop]."""
    if not len(intervals):
        return np.zeros([0, 2])
    clipped = np.clip(intervals, start, stop)
    return clipped[clipped[:, 1] > clipped[:, 0]]


def split_time(
    kinds: Mapping[str, np.ndarray], start: float, stop: float, rest: str
) -> dict[str, float]:
    """Returns seconds by kind that sum to stop - start: each instant counts for one kind.

    Where several kinds overlap, the first in the mapping's order counts.

    Args:
      kinds: (n, 2) intervals by kind.
      start: of what is split.
      stop: of what is split.
      rest: name of the time that no kind covers.
    """
    covered, total = np.zeros([0, 2]), 0.0
    seconds = {}
    for kind, intervals in kinds.items():
        covered = np.concatenate([covered, clip(intervals, start, stop)])
        reached = union_length(covered)
        seconds[kind], total = reached - total, reached
    return {**seconds, rest: max(0.0, stop - start - total)}
