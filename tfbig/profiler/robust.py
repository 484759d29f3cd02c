"""Statistics that single outliers do not move."""

import numpy as np

_NORMAL = 1.4826  # of a normal distribution, the standard deviation over the MAD
_MOST_POINTS = 300  # of a slope: all pairs are looked at


def spread(values: np.ndarray) -> float:
    """Returns the median absolute deviation, scaled to a normal's standard deviation."""
    return float(_NORMAL * np.median(np.abs(values - np.median(values)))) if len(values) else 0.0


def spread_of_rows(values: np.ndarray) -> np.ndarray:
    """Returns the spread of each row of (n, k) values."""
    middle = np.median(values, axis=1, keepdims=True)
    return _NORMAL * np.median(np.abs(values - middle), axis=1)


def outliers(values: np.ndarray, num_deviations: float) -> np.ndarray:
    """Returns the indices of values above median + num_deviations x spread.

    The outliers themselves widen no spread, as they do a standard deviation.
    """
    if not len(values):
        return np.zeros(0, np.int64)
    # Values that are nearly all alike have no spread: a hundredth of the median is one then.
    deviation = max(spread(values), 0.01 * abs(float(np.median(values))))
    return np.flatnonzero(values > np.median(values) + num_deviations * deviation)


def slope(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Returns the Theil-Sen slope and the share of pairs of points that rise.

    Args:
      x: (n,) ascending.
      y: (n,).

    Source: P. K. Sen, doi.org/10.1080/01621459.1968.10480934.
    """
    if len(x) > _MOST_POINTS:
        chosen = np.linspace(0, len(x) - 1, _MOST_POINTS).astype(int)
        x, y = x[chosen], y[chosen]
    first, second = np.triu_indices(len(x), 1)
    apart = x[second] > x[first]
    if not apart.any():
        return 0.0, 0.0
    rises = (y[second] - y[first])[apart] / (x[second] - x[first])[apart]
    return float(np.median(rises)), float((rises > 0).mean())


def jensen_shannon_distance(first: np.ndarray, second: np.ndarray) -> float:
    """Returns the distance, 0 to 1, of two histograms of equal bins.

    Source: D. M. Endres and J. E. Schindelin, doi.org/10.1109/TIT.2003.813506; base 2.
    """
    p, q = first / max(first.sum(), 1e-12), second / max(second.sum(), 1e-12)
    middle = (p + q) / 2

    def divergence(a: np.ndarray) -> float:
        known = a > 0
        return float((a[known] * np.log2(a[known] / middle[known])).sum())

    return float(np.sqrt(max(0.0, (divergence(p) + divergence(q)) / 2)))


def with_hysteresis(values: np.ndarray, enter: float, leave: float) -> np.ndarray:
    """Returns where values are high: from above `enter` until they fall below `leave`.

    >>> with_hysteresis(np.array([80, 95, 88, 84, 88]), 90, 85).tolist()
    [False, True, True, False, False]
    """
    # The newest of the two kinds of crossing decides.
    events = np.where(values > enter, 1, np.where(values < leave, -1, 0))
    places = np.maximum.accumulate(np.where(events != 0, np.arange(len(events)), -1))
    return (places >= 0) & (events[np.maximum(places, 0)] == 1)


def moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Returns the means (n - window + 1,) of `window` neighbours each."""
    if len(values) < window:
        return np.zeros(0)
    sums = np.cumsum(np.concatenate([[0.0], values.astype(np.float64)]))
    return (sums[window:] - sums[:-window]) / window
