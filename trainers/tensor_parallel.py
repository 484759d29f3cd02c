"""Layers shared among the ranks of the tensor axis: what enters and leaves a shared sublayer.

The gradients are ours, not Horovod's registered ones, which disagree among themselves about sums
and means.
"""

import tensorflow as tf

from tfbig.model.tensor_split import TensorSplit
from trainers.collectives import Group, Stopwatch


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
        if self.size == 1:
            return x

        @tf.custom_gradient
        def run(x: tf.Tensor):
            if self.shares_positions:
                return (
                    self._gather_positions(x, f"{name}.enter"),
                    lambda upstream: self._scatter_positions(upstream, f"{name}.enter_gradient"),
                )
            return tf.identity(x), lambda upstream: self._reduce(upstream, f"{name}.enter_gradient")

        return run(x)

    def leave(self, x: tf.Tensor, name: str) -> tf.Tensor:
        if self.size == 1:
            return x

        @tf.custom_gradient
        def run(x: tf.Tensor):
            if self.shares_positions:
                return (
                    self._scatter_positions(x, f"{name}.leave"),
                    lambda upstream: self._gather_positions(upstream, f"{name}.leave_gradient"),
                )
            return self._reduce(x, f"{name}.leave"), tf.identity

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
