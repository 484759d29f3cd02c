"""The loss of a head whose vocabulary is shared among devices; whole logits are nowhere."""

import tensorflow as tf

from tfbig.loss import sums_by_row
from tfbig.model.tensor_split import TensorSplit


def shared_head_loss(
    logits: tf.Tensor,
    labels: tf.Tensor,
    loss_mask: tf.Tensor,
    split: TensorSplit,
    vocab_size: int,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns what tfbig.loss.head_loss returns, from this part's logits.

    Args:
      logits: (B, T, V of this part), any float dtype; columns of padding are masked out.
      labels: (B, T) int32, in the whole vocabulary.
      loss_mask: (B, T), 1 where a label counts.
      split: which part of the vocabulary is here.
      vocab_size: of the whole vocabulary.

    Source: Megatron-LM (arXiv 1909.08053, section 3): only sums over the vocabulary travel.
    """
    start, size = split.part(vocab_size)
    column = tf.range(start, start + size)
    logits = tf.cast(logits, tf.float32)  # (B, T, V)
    logits = tf.where(column < vocab_size, logits, tf.float32.min)
    here = tf.cast(labels[..., tf.newaxis] == column, tf.float32)  # (B, T, V)

    @tf.custom_gradient
    def token_loss(logits: tf.Tensor):
        best = tf.argmax(logits, axis=-1, output_type=tf.int32)  # (B, T)
        largest = tf.reduce_max(logits, axis=-1)
        # Ids are exact in float32 up to 2^24, so that both travel in one collective.
        both = tf.stack([largest, tf.cast(best + start, tf.float32)])
        all_parts = split.gather(both, "loss.max")  # (parts, 2, B, T)
        largest = tf.reduce_max(all_parts[:, 0], axis=0)
        winner = tf.one_hot(tf.argmax(all_parts[:, 0], axis=0), split.size, axis=0)  # (parts, B, T)
        predicted = tf.cast(tf.reduce_sum(winner * all_parts[:, 1], axis=0), labels.dtype)
        shifted = logits - largest[..., tf.newaxis]  # (B, T, V)
        exponents = tf.exp(shifted)
        target = tf.reduce_sum(tf.where(here > 0, shifted, 0.0), axis=-1)
        totals = split.sum(tf.stack([tf.reduce_sum(exponents, axis=-1), target]), "loss.sum")

        def gradient(upstream: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
            softmax = exponents / totals[0][..., tf.newaxis]
            return (softmax - here) * upstream[..., tf.newaxis]

        return (tf.math.log(totals[0]) - totals[1], predicted), gradient  # (B, T) each

    loss, predicted = token_loss(logits)
    return sums_by_row(loss, predicted, labels, loss_mask)
