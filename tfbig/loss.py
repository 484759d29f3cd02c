"""Next-token loss as sums, so that any split of a batch adds up to the same mean."""

import tensorflow as tf


def sums_by_row(
    token_loss: tf.Tensor, predicted: tf.Tensor, labels: tf.Tensor, loss_mask: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the sums that `head_loss` returns.

    Args:
      token_loss: (B, T) float32.
      predicted: (B, T), the most likely token.
      labels: (B, T), of the same dtype.
      loss_mask: (B, T), 1 where a label counts and 0 where it doesn't.
    """
    mask = tf.cast(loss_mask, tf.float32)  # (B, T)
    row_loss_sum = tf.reduce_sum(token_loss * mask, axis=1)  # (B,)
    correct = tf.cast(predicted == labels, tf.float32) * mask
    return (
        tf.reduce_sum(row_loss_sum),
        tf.stop_gradient(row_loss_sum),
        tf.reduce_sum(mask, axis=1),
        tf.reduce_sum(correct, axis=1),
    )


def head_loss(
    logits: tf.Tensor, labels: tf.Tensor, loss_mask: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the summed cross-entropy of a microbatch and its parts by row.

    Args:
      logits: (B, T, V), any float dtype; the loss is computed in float32.
      labels: (B, T) int32, the token that follows each position.
      loss_mask: (B, T), 1 where a label counts and 0 where it doesn't.

    Returns:
      (loss_sum, row_loss_sum (B,), row_num_tokens (B,), row_num_correct (B,)), float32; only
      loss_sum is differentiable.
    """
    logits = tf.cast(logits, tf.float32)  # (B, T, V)
    token_loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)  # (B, T)
    predicted = tf.argmax(logits, axis=-1, output_type=labels.dtype)  # (B, T)
    return sums_by_row(token_loss, predicted, labels, loss_mask)
