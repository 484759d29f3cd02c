"""The keys and values of decoded tokens, kept between the calls of Trainer.decode_step.

R = rows, L = layers, H = heads, d = head_dim, C = blocks, K = positions of a block.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import tensorflow as tf

BLOCK_LENGTH = 64  # positions whose keys lie together; a step reads whole blocks
_ALIGNMENT = 64  # bytes, of memory that TensorFlow uses without copying it


class CacheShape(NamedTuple):
    """How large a cache is."""

    num_rows: int
    max_length: int
    num_layers: int
    num_heads: int
    head_dim: int
    dtype: np.dtype  # of keys and values

    @property
    def num_blocks(self) -> int:
        """Blocks of a row."""
        return -(-self.max_length // BLOCK_LENGTH)

    @property
    def array_shape(self) -> tuple[int, ...]:
        """Of the keys, or the values, of one layer: (C, R, H, K, d).

        Blocks come first, so that those in use are one piece of memory.
        """
        return (self.num_blocks, self.num_rows, self.num_heads, BLOCK_LENGTH, self.head_dim)


class Store(Protocol):
    """Where keys and values are: keys of all layers and then values of all layers."""

    def tensors(self, num_blocks: int) -> list[tf.Tensor]:
        """Returns all in one tensor (2 L, C, R, H, K, d), or in 2 L of (C, R, H, K, d).

        Args:
          num_blocks: C is at least this.
        """

    def write(
        self, new: tf.Tensor, index: np.ndarray, column: np.ndarray, row: np.ndarray, at: np.ndarray
    ) -> None:
        """Keeps new tokens.

        Args:
          new: (2 L, b, N, H, d).
          index: (T,), which of the b a token is of.
          column: (T,), which of the N it is.
          row: (T,), the row it belongs to.
          at: (T,), its position.
        """

    def reorder(self, row: np.ndarray, source: np.ndarray, num_blocks: int) -> None:
        """Gives rows `row` (T,) what the first blocks of rows `source` (T,) hold."""


class HostStore:
    """Memory of the host that TensorFlow reads in place; NumPy writes it between two steps.

    A variable would be copied as a whole, or in the part that is read, at each step.

    Args:
      shape: of the cache.
    """

    def __init__(self, shape: CacheShape) -> None:
        whole = (2 * shape.num_layers, *shape.array_shape)
        num_bytes = int(np.prod(whole)) * shape.dtype.itemsize
        memory = np.zeros(num_bytes + _ALIGNMENT, np.uint8)  # touched only where it is used
        start = -memory.ctypes.data % _ALIGNMENT
        self._array = memory[start : start + num_bytes].view(shape.dtype).reshape(whole)
        # DLPack has no name for NumPy's bfloat16: its bits travel, and the step reads them as such.
        plain = self._array if shape.dtype.kind == "f" else self._array.view(np.uint16)
        # One argument of the step: with one a layer, passing them took a quarter of a small
        # model's time.
        self._tensor = tf.experimental.dlpack.from_dlpack(plain.__dlpack__())

    def tensors(self, num_blocks: int) -> list[tf.Tensor]:
        return [self._tensor]

    def write(
        self, new: tf.Tensor, index: np.ndarray, column: np.ndarray, row: np.ndarray, at: np.ndarray
    ) -> None:
        block, place = at // BLOCK_LENGTH, at % BLOCK_LENGTH
        self._array[:, block, row, :, place] = new.numpy()[:, index, column].swapaxes(0, 1)

    def reorder(self, row: np.ndarray, source: np.ndarray, num_blocks: int) -> None:
        used = self._array[:, :num_blocks]
        used[:, :, row] = used[:, :, source]


class DeviceStore:
    """Variables on the device that computes.

    Args:
      shape: of the cache.
    """

    def __init__(self, shape: CacheShape) -> None:
        dtype = tf.as_dtype(shape.dtype)
        self._variables = [
            tf.Variable(tf.zeros(shape.array_shape, dtype), trainable=False)
            for _ in range(2 * shape.num_layers)
        ]

    def tensors(self, num_blocks: int) -> list[tf.Tensor]:
        return [variable.sparse_read(tf.range(num_blocks)) for variable in self._variables]

    def write(
        self, new: tf.Tensor, index: np.ndarray, column: np.ndarray, row: np.ndarray, at: np.ndarray
    ) -> None:
        num_heads = new.shape[3]
        head = np.tile(np.arange(num_heads), len(at))
        block, row, place = (
            np.repeat(x, num_heads) for x in (at // BLOCK_LENGTH, row, at % BLOCK_LENGTH)
        )
        where = np.stack([block, row, head, place], axis=1)  # (T*H, 4)
        chosen = tf.constant(np.stack([index, column], axis=1))  # (T, 2)
        for variable, part in zip(self._variables, tf.unstack(new), strict=True):
            vectors = tf.gather_nd(part, chosen)  # (T, H, d)
            variable.scatter_nd_update(where, tf.reshape(vectors, [-1, vectors.shape[-1]]))

    def reorder(self, row: np.ndarray, source: np.ndarray, num_blocks: int) -> None:
        block = np.repeat(np.arange(num_blocks), len(row))
        to, of = (np.stack([block, np.tile(x, num_blocks)], axis=1) for x in (row, source))
        for variable in self._variables:
            variable.scatter_nd_update(to, variable.gather_nd(of))


def make_store(shape: CacheShape) -> Store:
    """Returns the store that suits where the model is."""
    return DeviceStore(shape) if tf.config.list_logical_devices("GPU") else HostStore(shape)


class DecodeCache:
    """What a trainer keeps of the tokens decoded so far.

    Args:
      shape: of the cache.
      embed_dim: width D of the hidden state.
      weights: what the model computes with in this cache's time; empty means its variables.

    Attributes:
      length: (R,) int32, tokens held.
      last_hidden: (R, D), the last block's output for each row's last token.
    """

    def __init__(
        self, shape: CacheShape, embed_dim: int, weights: Sequence[tf.Tensor], store: Store
    ) -> None:
        self.shape, self.weights, self.store = shape, list(weights), store
        self.length = np.zeros(shape.num_rows, np.int32)
        self.last_hidden = tf.zeros([shape.num_rows, embed_dim], tf.as_dtype(shape.dtype))

    def begin(self, source_row: np.ndarray, reset: np.ndarray, num_valid: np.ndarray) -> None:
        """Moves and empties rows, before a step; arguments as for Trainer.decode_step."""
        length = np.where(reset, 0, self.length[source_row]).astype(np.int32)
        assert np.all(length + num_valid <= self.shape.max_length), "a row is longer than the cache"
        row = np.flatnonzero((source_row != np.arange(len(source_row))) & ~reset)
        if row.size:
            self.store.reorder(row, source_row[row], self._blocks_of(length))
            self.last_hidden = tf.gather(self.last_hidden, source_row)
        self.length = length

    def num_blocks(self) -> int:
        """Returns how many blocks hold something."""
        return self._blocks_of(self.length)

    def extend(self, new: tf.Tensor, rows: np.ndarray, num_valid: np.ndarray) -> None:
        """Keeps a step's new tokens.

        Args:
          new: (2 L, b, N, H, d), keys of all layers and then values.
          rows: (b,), the rows that were computed.
          num_valid: (R,), how many tokens of each count.
        """
        counts = num_valid[rows]
        index = np.repeat(np.arange(len(rows)), counts)
        column = np.concatenate([np.arange(count) for count in counts])
        row = rows[index]
        self.store.write(new, index, column, row, self.length[row] + column)
        self.length = self.length + num_valid.astype(np.int32)

    @staticmethod
    def _blocks_of(length: np.ndarray) -> int:
        return -(-int(length.max()) // BLOCK_LENGTH)
