"""How a layer's width is shared among devices, as the layers see it.

A sublayer that is shared holds some of the heads, of the feed-forward width or of the vocabulary.
The hidden state enters it, is multiplied by the part of the kernel that is here, and leaves it as
the sum of all parts: the two conjugate operations of Megatron-LM (arXiv 1909.08053, section 3).
The layers know no ranks; a strategy hands in a subclass that sums over its devices.
"""

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tfbig.variables import part_of, valid_part_of


class TensorSplit:
    """Shares nothing: everything is here. Subclasses share.

    Attributes:
      size: number of parts.
      index: which of them is here.
      shares_positions: whether the hidden state between the sublayers holds only some of the
        positions (sequence parallelism, arXiv 2205.05198, section 4.2.2).
    """

    size: int = 1
    index: int = 0
    shares_positions: bool = False

    def part(self, length: int) -> tuple[int, int]:
        """Returns (start, length) of this part of a shared dim, padding included.

        Args:
          length: of the whole dim.

        >>> TensorSplit().part(61)
        (0, 61)
        """
        return part_of(length, self.size, self.index)

    def valid_part(self, length: int) -> tuple[int, int]:
        """Returns (start, length) of this part of a shared dim without padding."""
        return valid_part_of(length, self.size, self.index)

    def enter(self, x: tf.Tensor, name: str) -> tf.Tensor:
        """Returns a hidden state (B, T, D) that a shared sublayer multiplies; gradients are summed.

        Args:
          x: (B, T, D), or this part's positions where they are shared.
          name: of the sublayer, the same on all devices.
        """
        return x

    def leave(self, x: tf.Tensor, name: str) -> tf.Tensor:
        """Returns the sum of all parts' products (B, T, D), or this part's positions of it."""
        return x

    def gather(self, x: tf.Tensor, name: str) -> tf.Tensor:
        """Returns all parts' tensors, stacked along a new first dim; has no gradient."""
        return x[tf.newaxis]

    def sum(self, x: tf.Tensor, name: str) -> tf.Tensor:
        """Returns the sum of all parts' tensors; has no gradient."""
        return x

    @contextlib.contextmanager
    def whole_positions(self) -> Iterator[None]:
        """Within it, the hidden state between sublayers has all positions: for inference."""
        shares_positions, self.shares_positions = self.shares_positions, False
        try:
            yield
        finally:
            self.shares_positions = shares_positions

    def first_position(self, num_positions: int) -> int:
        """Returns the index of the first position here, of `num_positions` here."""
        return self.index * num_positions if self.shares_positions else 0

    def own_length(self, length: int) -> int:
        """Returns how many of `length` positions a hidden state has here."""
        return length // self.size if self.shares_positions else length

    def own_positions(self, x: tf.Tensor, axis: int) -> tf.Tensor:
        """Returns this part's positions of a tensor that has all of them along `axis`."""
        if not self.shares_positions:
            return x
        count = self.own_length(x.shape[axis])
        begin, size = [0] * x.shape.rank, [-1] * x.shape.rank
        begin[axis], size[axis] = self.index * count, count
        return tf.slice(x, begin, size)


WHOLE = TensorSplit()
