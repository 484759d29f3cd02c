"""When the parts of a step ran, on this rank's clock. TensorFlow-free."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

Spans = Mapping[str, np.ndarray]  # name -> (n, 2) float64: start and stop, seconds since 1970


class StepSpans(NamedTuple):
    """One step as this rank saw it.

    A step lasts until the next one begins, or its result is read.
    """

    step: int
    start: float  # seconds since 1970
    seconds: float
    data_wait: float  # at the step's beginning
    communication: Mapping[str, float]  # by mesh axis, seconds in which a collective was in flight
    spans: Spans  # "forward", "backward" where a strategy drives them; mesh axes' collectives


def no_spans() -> Spans:
    """Returns none: what a strategy gives that notes no spans."""
    return {}
