"""Causal attention as a function of queries, keys and values."""

import math

import tensorflow as tf

from tfbig.model.dropout import drop, keep_mask


def causal_attention(
    query: tf.Tensor,
    key: tf.Tensor,
    value: tf.Tensor,
    document_ids: tf.Tensor | None = None,
    dropout_keys: tf.Tensor | None = None,
    dropout_rate: float = 0.0,
    first_head: int = 0,
) -> tf.Tensor:
    """Returns softmax(q k^T / sqrt(head_dim)) v, each position seeing itself and what precedes.

    Args:
      query: (B, T, H, head_dim), in the compute dtype.
      key: as query.
      value: as query.
      document_ids: (B, T) int32 or None; positions see their own document only.
      dropout_keys: (B,) uint32 from `sample_keys`, or None for no dropout.
      dropout_rate: share of attention weights that is dropped.
      first_head: index of the first head here in the full layer, which keys its dropout.

    Returns:
      (B, T, H, head_dim). The softmax is computed in float32, in float64 for float64 inputs.
    """
    num_positions, num_heads, head_dim = query.shape[1:]
    if num_positions is None:  # a graph that is saved takes any length
        num_positions = tf.shape(query)[1]
    query, key, value = (tf.transpose(x, [0, 2, 1, 3]) for x in (query, key, value))  # (B, H, T, d)
    query *= tf.cast(1.0 / math.sqrt(head_dim), query.dtype)
    dtype = tf.float64 if query.dtype == tf.float64 else tf.float32
    scores = tf.cast(tf.matmul(query, key, transpose_b=True), dtype)  # (B, H, T, T)
    position = tf.range(num_positions)
    visible = position[:, tf.newaxis] >= position  # (T, T)
    if document_ids is not None:
        same = document_ids[:, :, tf.newaxis] == document_ids[:, tf.newaxis, :]  # (B, T, T)
        visible = (visible & same)[:, tf.newaxis]  # (B, 1, T, T)
    weights = tf.nn.softmax(tf.where(visible, scores, dtype.min))  # (B, H, T, T)
    if dropout_keys is not None and dropout_rate > 0:
        shape = [num_heads, num_positions, num_positions]
        first = first_head * num_positions**2
        index = tf.range(first, first + math.prod(shape))
        index = tf.cast(tf.reshape(index, shape), tf.uint32)  # (H, T, T)
        mask = keep_mask(dropout_keys, index, dropout_rate)
        weights = drop(weights, mask, dropout_rate)
    output = tf.matmul(tf.cast(weights, value.dtype), value)  # (B, H, T, d)
    return tf.transpose(output, [0, 2, 1, 3])  # (B, T, H, d)
