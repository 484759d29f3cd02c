"""When collectives were in flight: time that a graph notes for itself."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import config as tf_config

Outputs = list[tf.Tensor]


def _has_time() -> bool:
    """Whether graphs may ask for the time: TF refuses that where results must be deterministic."""
    return not tf_config.is_op_determinism_enabled()


def _timed(
    inputs: Sequence[tf.Tensor], call: Callable[[], Outputs]
) -> tuple[Outputs, tf.Tensor, tf.Tensor]:
    """Returns call()'s outputs and the times at which its inputs and outputs were there."""
    with tf.control_dependencies(list(inputs)):
        start = tf.timestamp()
    with tf.control_dependencies([start]):
        outputs = call()
    with tf.control_dependencies(list(outputs)):
        return outputs, start, tf.timestamp()


class Clock:
    """Collects, while one function is traced, when its collectives were in flight."""

    def __init__(self) -> None:
        self._intervals: dict[str, list[tf.Tensor]] = {}

    def around(
        self, axis: str, inputs: Sequence[tf.Tensor], call: Callable[[], Outputs]
    ) -> Outputs:
        """Returns call()'s outputs, noting the time before and after.

        Args:
          axis: mesh axis the time counts for.
          inputs: must be there before the clock starts.
          call: makes the collective and returns its outputs.
        """
        if not _has_time():
            return call()
        outputs, start, stop = _timed(inputs, call)
        self._intervals.setdefault(axis, []).append(tf.stack([start, stop]))
        return outputs

    def intervals(self) -> dict[str, tf.Tensor]:
        """Returns (n, 2) start and stop times by axis; the traced function must return them."""
        return {axis: tf.stack(pairs) for axis, pairs in self._intervals.items()}


class Stopwatch:
    """Adds up, in a variable, the seconds collectives were in flight.

    For functions whose outputs are not ours to choose, such as a backward pass that TensorFlow
    makes. Collectives that run side by side are counted twice.
    """

    def __init__(self) -> None:
        self.seconds = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="seconds")

    def around(
        self, axis: str, inputs: Sequence[tf.Tensor], call: Callable[[], Outputs]
    ) -> Outputs:
        """Returns call()'s outputs, which wait until the time is noted."""
        if not _has_time():
            return call()
        outputs, start, stop = _timed(inputs, call)
        with tf.control_dependencies([self.seconds.assign_add(stop - start)]):
            return [tf.identity(output) for output in outputs]

    def take(self) -> float:
        """Returns the seconds since the last call."""
        seconds = float(self.seconds)
        self.seconds.assign(0.0)
        return seconds


Timer = Clock | Stopwatch


def seconds_in_flight(intervals: np.ndarray) -> float:
    """Returns how long at least one of the (n, 2) intervals was open.

    >>> seconds_in_flight(np.array([[0.0, 2.0], [1.0, 3.0], [5.0, 6.0]]))
    4.0
    """
    total, reached = 0.0, -np.inf
    for start, stop in sorted(map(tuple, np.asarray(intervals))):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return float(total)


def joined(recorded: Sequence[Mapping[str, tf.Tensor]]) -> dict[str, np.ndarray]:
    """Returns the (n, 2) intervals of several functions together, by mesh axis."""
    by_axis: dict[str, list[np.ndarray]] = {}
    for intervals in recorded:
        for axis, pairs in intervals.items():
            by_axis.setdefault(axis, []).append(pairs.numpy())
    return {axis: np.concatenate(x) for axis, x in by_axis.items()}
