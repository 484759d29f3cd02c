"""How a stored tensor shows one of our variables: another order and grouping of its dims."""

import math
from typing import NamedTuple

import numpy as np

from tfbig.rectangle import Rectangle


class TensorView(NamedTuple):
    """A variable as another library stores it. TensorFlow-free.

    Attributes:
      name: of the stored tensor, without a prefix.
      stored_shape: its shape in the file.
      grouped_shape: the same elements with merged dims taken apart, e.g. (H, 3, d, D) of a
        (3 D, D) tensor.
      dims: for each dim of our variable, which of the grouped dims it is.

    Example:
      >>> view = TensorView("fc.weight", (6, 2), (6, 2), (1, 0))  # (out, in), ours is (in, out)
      >>> view.shape
      (2, 6)
    """

    name: str
    stored_shape: tuple[int, ...]
    grouped_shape: tuple[int, ...]
    dims: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of our variable."""
        return tuple(self.grouped_shape[dim] for dim in self.dims)

    def stored_rectangle(self, wanted: Rectangle) -> Rectangle:
        """Returns where a rectangle of our variable lies in the grouped tensor."""
        place = np.argsort(self.dims)  # for each grouped dim, which of our dims it is
        return Rectangle(
            tuple(wanted.start[dim] for dim in place), tuple(wanted.shape[dim] for dim in place)
        )

    def from_grouped(self, array: np.ndarray) -> np.ndarray:
        """Returns our order of dims of (a rectangle of) the grouped tensor."""
        return np.transpose(array, self.dims)

    def to_stored(self, array: np.ndarray) -> np.ndarray:
        """Returns the tensor to store for the whole of our variable."""
        assert array.shape == self.shape, (self.name, array.shape, self.shape)
        return np.transpose(array, np.argsort(self.dims)).reshape(self.stored_shape)


def plain(name: str, *shape: int) -> TensorView:
    """Returns the view of a tensor that is stored as ours is."""
    return TensorView(name, shape, shape, tuple(range(len(shape))))


def flattened(name: str, stored_shape: tuple[int, ...], shape: tuple[int, ...]) -> TensorView:
    """Returns the view of a tensor whose elements lie in our order, with dims merged."""
    assert math.prod(stored_shape) == math.prod(shape)
    return TensorView(name, stored_shape, shape, tuple(range(len(shape))))
