"""What a step returns: one tensor for each microbatch, and the ways to make one of them."""

import functools
from collections.abc import Sequence

import tensorflow as tf

from tfbig.errors import UserError


class StepOutput:
    """A tensor that `smp.step`'s function returned, of every microbatch.

    Attributes:
      outputs: by microbatch.
    """

    def __init__(self, outputs: Sequence[tf.Tensor]) -> None:
        self.outputs = list(outputs)

    def reduce_mean(self) -> tf.Tensor:
        """Returns the mean over the microbatches."""
        return self._divided(self.reduce_sum())

    def reduce_sum(self) -> tf.Tensor:
        """Returns the sum over the microbatches."""
        return tf.add_n(self.outputs)

    def concat(self) -> tf.Tensor:
        """Returns the microbatches joined along their first dim, as the whole batch has it."""
        if self.outputs[0].shape.rank == 0:
            return self.stack()
        return tf.concat(self.outputs, axis=0)

    def stack(self) -> tf.Tensor:
        """Returns the microbatches along a new first dim."""
        return tf.stack(self.outputs)

    def merge(self) -> tf.Tensor:
        """Returns what `concat` does: predictions of the whole batch."""
        return self.concat()

    def accumulate(self, method: str = "variable", var: tf.Variable | None = None) -> tf.Tensor:
        """Returns the mean over the microbatches, added up one by one as they are made.

        Args:
          method: "variable", "add_n" or "accumulate_n"; the sum is made the same way for each.
          var: takes the result as well.

        Raises:
          UserError: another method.
        """
        if method not in ("variable", "add_n", "accumulate_n"):
            raise UserError(
                f"accumulate(method={method!r}): methods are variable, add_n and accumulate_n."
            )
        mean = self._divided(functools.reduce(tf.add, self.outputs))
        if var is not None:
            var.assign(mean)
        return mean

    def _divided(self, total: tf.Tensor) -> tf.Tensor:
        return total / tf.cast(len(self.outputs), total.dtype)
