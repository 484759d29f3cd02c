"""Layers shared among the ranks of the tensor axis: what enters and leaves a shared sublayer.

The gradients are ours, not Horovod's registered ones, which disagree among themselves about sums
and means.
"""

from collections.abc import Callable

import tensorflow as tf

from tfbig.model.tensor_split import TensorSplit
from trainers.clock import Stopwatch
from trainers.collectives import Group

Exchange = Callable[[tf.Tensor, str], tf.Tensor]


def _identity(x: tf.Tensor, name: str) -> tf.Tensor:
    return tf.identity(x)


class TensorParallel(TensorSplit):
    """The share of one rank of a tensor group.

    Args:
      group: the ranks that share each layer.
      shares_positions: sequence parallelism: norms, dropout and residual sums are shared along
        time, and what enters a sublayer is gathered, what leaves it scattered.
      stopwatch: adds up the time in flight.
    """

    def __init__(
        self, group: Group, shares_positions: bool = False, stopwatch: Stopwatch | None = None
    ) -> None:
        self._group, self._stopwatch = group, stopwatch
        self.size, self.index = group.size, group.rank
        self.shares_positions = shares_positions and group.size > 1

    def enter(self, x: tf.Tensor, name: str) -> tf.Tensor:
        if self.shares_positions:
            return self._conjugate(
                x, self._gather_positions, self._scatter_positions, name + ".enter"
            )
        return self._conjugate(x, _identity, self._reduce, name + ".enter")

    def leave(self, x: tf.Tensor, name: str) -> tf.Tensor:
        if self.shares_positions:
            return self._conjugate(
                x, self._scatter_positions, self._gather_positions, name + ".leave"
            )
        return self._conjugate(x, self._reduce, _identity, name + ".leave")

    def _conjugate(
        self, x: tf.Tensor, forward: Exchange, backward: Exchange, name: str
    ) -> tf.Tensor:
        """Returns forward(x), whose gradient is backward(upstream)."""
        if self.size == 1:
            return x

        @tf.custom_gradient
        def run(x: tf.Tensor):
            return forward(x, name), lambda upstream: backward(upstream, f"{name}_gradient")

        return run(x)

    def gather(self, x: tf.Tensor, name: str) -> tf.Tensor:
        return self._group.all_gather(x[tf.newaxis], name, self._stopwatch)

    def sum(self, x: tf.Tensor, name: str) -> tf.Tensor:
        return self._reduce(x, name)

    def _reduce(self, x: tf.Tensor, name: str) -> tf.Tensor:
        return self._group.all_reduce(x, name, clock=self._stopwatch)

    def _gather_positions(self, x: tf.Tensor, name: str) -> tf.Tensor:
        first = tf.transpose(x, [1, 0, 2])  # (T/t, B, D)
        return tf.transpose(self._group.all_gather(first, name, self._stopwatch), [1, 0, 2])

    def _scatter_positions(self, x: tf.Tensor, name: str) -> tf.Tensor:
        first = tf.transpose(x, [1, 0, 2])  # (T, B, D)
        shape = [first.shape[0] // self.size, *first.shape[1:]]
        part = self._group.reduce_scatter(first, name, self._stopwatch)
        return tf.transpose(tf.ensure_shape(part, shape), [1, 0, 2])  # (B, T/t, D)
