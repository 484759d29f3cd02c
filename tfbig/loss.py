"""Next-token loss as sums, so that any split of a batch adds up to the same mean."""

import tensorflow as tf

from tfbig.loss_config import LossConfig

PLAIN = LossConfig()


def objective(
    token_loss: tf.Tensor, log_sum: tf.Tensor, mean_logit: tf.Tensor | None, terms: LossConfig
) -> tf.Tensor:
    """Returns what is minimised for each token, of the tokens' shape.

    Args:
      token_loss: cross-entropies.
      log_sum: logarithms of the softmaxes' sums.
      mean_logit: means over the vocabulary; needed for label smoothing only.
      terms: weights of what is added.

    Sources: label smoothing, Szegedy et al. (arXiv 1512.00567, section 7); z-loss, PaLM
    (arXiv 2204.02311, section 5).
    """
    if terms.label_smoothing:
        # Cross-entropy against a uniform target is log_sum - mean_logit.
        smooth = tf.constant(terms.label_smoothing, token_loss.dtype)
        token_loss += smooth * (log_sum - mean_logit - token_loss)
    if terms.z_loss:
        token_loss += tf.constant(terms.z_loss, log_sum.dtype) * log_sum**2
    return token_loss


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
    row_loss_sum = tf.reduce_sum(tf.cast(token_loss, tf.float32) * mask, axis=1)  # (B,)
    correct = tf.cast(predicted == labels, tf.float32) * mask
    return (
        tf.reduce_sum(row_loss_sum),
        tf.stop_gradient(row_loss_sum),
        tf.reduce_sum(mask, axis=1),
        tf.reduce_sum(correct, axis=1),
    )


def head_loss(
    logits: tf.Tensor, labels: tf.Tensor, loss_mask: tf.Tensor, terms: LossConfig = PLAIN
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the summed loss of a microbatch and its parts by row, from whole logits.

    Args:
      logits: (B, T, V), any float dtype; the loss is computed in float32, in float64 for float64.
      labels: (B, T) int32, the token that follows each position.
      loss_mask: (B, T), 1 where a label counts and 0 where it doesn't.
      terms: what is minimised besides the cross-entropy.

    Returns:
      (loss_sum, row_loss_sum (B,), row_num_tokens (B,), row_num_correct (B,)); only loss_sum is
      differentiable, and only it holds the terms.
    """
    logits = tf.cast(logits, tf.float64 if logits.dtype == tf.float64 else tf.float32)  # (B, T, V)
    token_loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)  # (B, T)
    predicted = tf.argmax(logits, axis=-1, output_type=labels.dtype)  # (B, T)
    sums = sums_by_row(token_loss, predicted, labels, loss_mask)
    if terms.is_plain:
        return sums
    log_sum, mean_logit = tf.reduce_logsumexp(logits, -1), tf.reduce_mean(logits, -1)  # (B, T)
    minimised = objective(token_loss, log_sum, mean_logit, terms)
    return tf.reduce_sum(minimised * tf.cast(loss_mask, minimised.dtype)), *sums[1:]
