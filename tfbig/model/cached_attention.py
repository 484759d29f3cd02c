"""Attention of new tokens over a decode cache: what precedes them is read, not computed again.

B = rows, N = new tokens of a row, H = heads, d = head_dim, C = blocks of the cache,
K = positions of a block.
"""

import math
from collections.abc import Mapping

import tensorflow as tf


def cached_attention(
    query: tf.Tensor,
    key: tf.Tensor,
    value: tf.Tensor,
    cached_key: tf.Tensor,
    cached_value: tf.Tensor,
    length: tf.Tensor,
) -> tf.Tensor:
    """Returns what causal_attention gives the new tokens of rows that have a past.

    Sums over the past are made block by block and then over the blocks in order: blocks that a row
    does not reach add exact zeros, so that a row's result does not depend on how long others are.

    Args:
      query: (B, N, H, d), in the compute dtype.
      key: of the new tokens, as query.
      value: of the new tokens, as query.
      cached_key: (C, B, H, K, d), position p of a row at block p // K, place p % K.
      cached_value: as cached_key.
      length: (B,) int32, positions of each row that the cache holds.

    Returns:
      (B, N, H, d). The softmax is computed in float32, in float64 for float64 inputs.
    """
    head_dim = query.shape[-1]
    query, key, value = (tf.transpose(x, [0, 2, 1, 3]) for x in (query, key, value))  # (B, H, N, d)
    query *= tf.cast(1.0 / math.sqrt(head_dim), query.dtype)
    dtype = tf.float64 if query.dtype == tf.float64 else tf.float32
    num_blocks, block_length = tf.shape(cached_key)[0], cached_key.shape[3]
    past = tf.cast(tf.matmul(query[tf.newaxis], cached_key, transpose_b=True), dtype)
    place = tf.range(num_blocks)[:, tf.newaxis] * block_length + tf.range(block_length)  # (C, K)
    held = place[:, tf.newaxis] < length[tf.newaxis, :, tf.newaxis]  # (C, B, K)
    past = tf.where(held[:, :, tf.newaxis, tf.newaxis], past, dtype.min)  # (C, B, H, N, K)
    new = tf.cast(tf.matmul(query, key, transpose_b=True), dtype)  # (B, H, N, N)
    index = tf.range(tf.shape(key)[2])
    new = tf.where(index[:, tf.newaxis] >= index, new, dtype.min)
    # Each row of `new` sees at least itself, so that the largest score is a visible one.
    largest = tf.reduce_max(new, axis=-1, keepdims=True)  # (B, H, N, 1)
    largest = tf.maximum(largest, tf.reduce_max(past, axis=[0, 4])[..., tf.newaxis])
    past, new = tf.exp(past - largest), tf.exp(new - largest)
    total = tf.reduce_sum(tf.reduce_sum(past, axis=-1), axis=0) + tf.reduce_sum(new, axis=-1)
    from_past = tf.matmul(tf.cast(past, value.dtype), cached_value)  # (C, B, H, N, d)
    output = tf.reduce_sum(tf.cast(from_past, dtype), axis=0)
    output += tf.cast(tf.matmul(tf.cast(new, value.dtype), value), dtype)  # (B, H, N, d)
    output = tf.cast(output / total[..., tf.newaxis], value.dtype)
    return tf.transpose(output, [0, 2, 1, 3])  # (B, N, H, d)


class CacheView:
    """A decode cache as the blocks of a model see it during one step.

    Args:
      keys: (C, B, H, K, d) by global index of the block.
      values: as keys.
      length: (B,) int32, positions of each row that are held.

    Attributes:
      new: (key, value) of the new tokens, (B, N, H, d) each, by index of the block.
    """

    def __init__(
        self, keys: Mapping[int, tf.Tensor], values: Mapping[int, tf.Tensor], length: tf.Tensor
    ) -> None:
        self._keys, self._values, self._length = keys, values, length
        self.new: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}

    def attend(self, index: int, query: tf.Tensor, key: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
        """Returns the attention (B, N, H, d) of block `index`, and keeps its keys and values."""
        self.new[index] = (key, value)
        return cached_attention(
            query, key, value, self._keys[index], self._values[index], self._length
        )
