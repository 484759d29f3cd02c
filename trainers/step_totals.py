"""What a step sums over all ranks besides gradients, as one vector for one collective."""

from typing import NamedTuple

import tensorflow as tf

NUM_SIGNALS = 4


class StepTotals(NamedTuple):
    """Sums over the global batch, equal on every rank."""

    loss_sum: tf.Tensor  # float64
    num_tokens: tf.Tensor  # float64
    source_loss_sum: tf.Tensor  # (num_sources,) float64
    source_num_tokens: tf.Tensor  # (num_sources,) float64
    signal: tf.Tensor  # int32: the largest that any rank passed


def pack(
    row_loss: tf.Tensor,
    row_tokens: tf.Tensor,
    source_index: tf.Tensor,
    signal: tf.Tensor,
    num_sources: int,
) -> tf.Tensor:
    """Returns this rank's part (2 + 2 sources + signals,) float64, to be summed over ranks.

    The signal is a one-hot, so that the same sum also gives its maximum.

    Args:
      row_loss: (b,) summed loss of each row.
      row_tokens: (b,) tokens of each row.
      source_index: (b,) int32.
      signal: scalar int32, 0 to NUM_SIGNALS - 1.
      num_sources: sources of the data.
    """
    rows = tf.cast(tf.stack([row_loss, row_tokens], axis=1), tf.float64)  # (b, 2)
    by_source = tf.math.unsorted_segment_sum(rows, source_index, num_sources)  # (sources, 2)
    return tf.concat(
        [
            tf.reduce_sum(rows, axis=0),
            by_source[:, 0],
            by_source[:, 1],
            tf.one_hot(signal, NUM_SIGNALS, dtype=tf.float64),
        ],
        0,
    )


def unpack(vector: tf.Tensor, num_sources: int) -> StepTotals:
    """Returns the parts of the vector that `pack` made and a collective summed."""
    loss, tokens, source_loss, source_tokens, signals = tf.split(
        vector, [1, 1, num_sources, num_sources, NUM_SIGNALS]
    )
    seen = tf.range(NUM_SIGNALS) * tf.cast(signals > 0, tf.int32)  # (signals,)
    return StepTotals(loss[0], tokens[0], source_loss, source_tokens, tf.reduce_max(seen))
