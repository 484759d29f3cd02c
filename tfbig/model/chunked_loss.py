"""Head and cross-entropy in one, some tokens at a time: whole logits are nowhere.

The gradients of the hidden state and of the weight are made while a chunk's logits exist, as the
loss is a sum whose gradient needs no more than they; the backward pass only multiplies them by the
upstream scalar. Nothing of size tokens x V is kept, and no product is made twice.

N = tokens, n = tokens of a chunk, D = width, V = vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfbig.loss import PLAIN, objective
from tfbig.loss_config import LossConfig
from tfbig.token_chunks import chunk_tokens


class _Chunk(NamedTuple):
    """What a chunk leaves behind."""

    token_loss: tf.Tensor  # (n,)
    minimised: tf.Tensor  # (n,)
    predicted: tf.Tensor  # (n,)
    hidden_part: tf.Tensor | None  # (n, D), where gradients are made


def chunked_token_loss(
    hidden: tf.Tensor,
    weight: tf.Tensor,
    bias: tf.Tensor | None,
    labels: tf.Tensor,
    loss_mask: tf.Tensor,
    is_table: bool,
    with_gradient: bool,
    num_chunk_tokens: int | None = None,
    terms: LossConfig = PLAIN,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns (summed loss, token_loss (N,), predicted (N,)); only the sum is differentiable.

    Args:
      hidden: (N, D), what the head multiplies, in the compute dtype.
      weight: (V, D) if is_table, else (D, V); any float dtype.
      bias: (V,) or None.
      labels: (N,) int32.
      loss_mask: (N,), 1 where a label counts.
      is_table: whether the weight is an embedding table.
      with_gradient: False where nobody will ask for gradients, which are made at once.
      num_chunk_tokens: tokens of a chunk; None leaves it to `chunk_tokens`.
      terms: what is minimised besides the cross-entropy; in the sum only.
    """
    step = num_chunk_tokens or chunk_tokens(weight.shape[0 if is_table else 1])
    mask = tf.cast(loss_mask, exact_dtype(hidden.dtype))
    # The bias is an argument like the others, so that it has a gradient.
    arguments = [hidden, weight] if bias is None else [hidden, weight, bias]

    @tf.custom_gradient
    def run(hidden: tf.Tensor, weight: tf.Tensor, *bias: tf.Tensor):
        factor = tf.cast(weight, hidden.dtype)
        chunks: list[_Chunk] = []
        totals: list[tf.Tensor] = []
        made: list[tf.Tensor] = []
        for first in range(0, hidden.shape[0], step):
            rows = slice(first, min(first + step, hidden.shape[0]))
            with tf.control_dependencies(made):  # the chunk before is done and its logits gone
                own = tf.identity(hidden[rows])  # (n, D)
            chunk, change = _losses(own, factor, bias, labels[rows], is_table, terms)
            if with_gradient:
                row_mask = mask[rows, tf.newaxis]  # (n, 1)
                part, parts = _gradients(own, factor, change, row_mask, is_table, bool(bias))
                totals = [a + b for a, b in zip(totals, parts, strict=True)] if totals else parts
                chunk = chunk._replace(hidden_part=part)
            made = [*totals, chunk.hidden_part] if with_gradient else [chunk.minimised]
            chunks.append(chunk)
        token_loss, minimised, predicted = (
            tf.concat(parts, 0) for parts in zip(*(chunk[:3] for chunk in chunks), strict=True)
        )

        def gradient(upstream: tf.Tensor, *_: tf.Tensor):
            assert with_gradient, "a gradient of a head that was told nobody would ask for one"
            parts = [tf.concat([chunk.hidden_part for chunk in chunks], 0), *totals]
            return _scaled(parts, upstream, [hidden, weight, *bias])

        return (tf.reduce_sum(minimised * mask), token_loss, predicted), gradient

    summed, token_loss, predicted = run(*arguments)
    return summed, tf.stop_gradient(token_loss), predicted


def _scaled(
    parts: Sequence[tf.Tensor], upstream: tf.Tensor, like: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Returns the parts times a scalar, in the dtypes of what they are gradients of."""
    return [
        tf.cast(part * tf.cast(upstream, part.dtype), x.dtype)
        for part, x in zip(parts, like, strict=True)
    ]


def exact_dtype(dtype: tf.DType) -> tf.DType:
    """Returns the dtype that losses and sums are made in."""
    return tf.float64 if dtype == tf.float64 else tf.float32


def _losses(
    own: tf.Tensor,
    factor: tf.Tensor,
    bias: Sequence[tf.Tensor],
    labels: tf.Tensor,
    is_table: bool,
    terms: LossConfig,
) -> tuple[_Chunk, tf.Tensor]:
    """Returns a chunk's losses, and the gradients (n, V) of its logits."""
    logits = tf.matmul(own, factor, transpose_b=is_table)  # (n, V)
    if bias:
        logits = tf.nn.bias_add(logits, tf.cast(bias[0], own.dtype))
    logits = tf.cast(logits, exact_dtype(own.dtype))
    # The operation gives the loss and softmax - one_hot, its gradient, together.
    loss, change = tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits(features=logits, labels=labels)
    predicted = tf.argmax(logits, axis=-1, output_type=labels.dtype)
    if terms.is_plain:
        return _Chunk(loss, loss, predicted, None), change
    log_sum = loss + tf.gather(logits, labels, batch_dims=1)  # (n,)
    minimised = objective(loss, log_sum, tf.reduce_mean(logits, axis=-1), terms)
    return _Chunk(loss, minimised, predicted, None), _with_terms(change, labels, log_sum, terms)


def _with_terms(
    change: tf.Tensor, labels: tf.Tensor, log_sum: tf.Tensor, terms: LossConfig
) -> tf.Tensor:
    """Returns the gradients (n, V) of logits with those of what is minimised besides.

    Args:
      change: softmax - one_hot, (n, V).
      labels: (n,).
      log_sum: logarithms of the softmaxes' sums, (n,).
      terms: as `tfbig.loss.objective` adds them.
    """
    smooth = tf.constant(terms.label_smoothing, change.dtype)
    more = tf.constant(2.0 * terms.z_loss, change.dtype) * log_sum  # (n,)
    change *= 1.0 + more[:, tf.newaxis]
    place = tf.stack([tf.range(tf.size(labels)), labels], axis=1)  # (n, 2)
    change = tf.tensor_scatter_nd_add(change, place, more + smooth)
    return change - smooth / change.shape[1]


def _gradients(
    own: tf.Tensor,
    factor: tf.Tensor,
    change: tf.Tensor,
    row_mask: tf.Tensor,
    is_table: bool,
    has_bias: bool,
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Returns the gradients of a chunk's hidden state (n, D), and of weight and bias.

    The mask (n, 1) multiplies what is narrow: (n, D), not (n, V).
    """
    exact = row_mask.dtype
    change = tf.cast(change, own.dtype)
    part = tf.matmul(change, factor, transpose_b=not is_table)  # (n, D)
    masked = own * tf.cast(row_mask, own.dtype)  # (n, D)
    parts = weight_gradients(masked, change, is_table)
    if has_bias:
        parts.append(tf.reduce_sum(tf.cast(change, exact) * row_mask, 0))  # (V,)
    return tf.cast(part, exact) * row_mask, [tf.cast(part, exact) for part in parts]


def weight_gradients(own: tf.Tensor, change: tf.Tensor, is_table: bool) -> list[tf.Tensor]:
    """Returns, in a list, the weight's gradient of a chunk's (n, D) and its logits' (n, V)."""
    first_factor, second = (change, own) if is_table else (own, change)
    return [tf.matmul(first_factor, second, transpose_a=True)]  # as weight
