"""Head and loss where the vocabulary is shared among devices, or several passes are in flight.

Some tokens at a time, as in chunked_loss.py, but gradients are made in the backward pass: what a
forward pass keeps is a few numbers a token, of which all devices' together give the softmax, and
the logits of a chunk are made again. They are kept where there is one chunk only.

N = tokens, n = tokens of a chunk, D = width, V = vocabulary, v = its part here.
"""

from collections.abc import Sequence

import tensorflow as tf

from tfbig.loss import PLAIN, objective
from tfbig.loss_config import LossConfig
from tfbig.model.chunked_loss import exact_dtype, weight_gradients
from tfbig.model.tensor_split import TensorSplit
from tfbig.token_chunks import chunk_tokens


class SharedHead:
    """A head's weight and what of the vocabulary it is for.

    Args:
      is_table: whether the weight is an embedding table (v, D), else it is (D, v).
      split: which part of the vocabulary is here.
      vocab_size: V; columns beyond it are padding.
      terms: what is minimised besides the cross-entropy.
      num_chunk_tokens: tokens of a chunk; None leaves it to `chunk_tokens`.
    """

    def __init__(
        self,
        is_table: bool,
        split: TensorSplit,
        vocab_size: int,
        terms: LossConfig = PLAIN,
        num_chunk_tokens: int | None = None,
    ) -> None:
        self._is_table, self._split, self._terms = is_table, split, terms
        self._vocab_size = vocab_size
        self._start, self._size = split.part(vocab_size)
        self._step = num_chunk_tokens or chunk_tokens(self._size)

    def loss(
        self,
        hidden: tf.Tensor,
        weight: tf.Tensor,
        bias: tf.Tensor | None,
        labels: tf.Tensor,
        loss_mask: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns (summed loss, token_loss (N,), predicted (N,)); only the sum is differentiable.

        Args:
          hidden: (N, D), what the head multiplies, in the compute dtype.
          weight: of the part here; any float dtype.
          bias: (v,) or None.
          labels: (N,) int32, in the whole vocabulary.
          loss_mask: (N,), 1 where a label counts.

        Source: Megatron-LM (arXiv 1909.08053, section 3): only numbers of tokens travel.
        """
        mask = tf.cast(loss_mask, exact_dtype(hidden.dtype))
        num_tokens = hidden.shape[0]
        chunks = [
            slice(first, min(first + self._step, num_tokens))
            for first in range(0, num_tokens, self._step)
        ]

        @tf.custom_gradient
        def run(hidden: tf.Tensor, weight: tf.Tensor, *bias: tf.Tensor):
            factor = tf.cast(weight, hidden.dtype)
            columns: list[tf.Tensor] = []
            kept: list[tf.Tensor] = []
            for rows in chunks:
                with tf.control_dependencies(columns[-1:]):  # the last chunk's logits are gone
                    own = tf.identity(hidden[rows])  # (n, D)
                kept = [self._logits(own, factor, bias)]
                columns.append(self._statistics(kept[0], labels[rows]))
            found = self._whole(tf.concat(columns, 1), labels.dtype)  # (N,) each
            token_loss, predicted, log_sum, mean_logit = found
            minimised = objective(token_loss, log_sum, mean_logit, self._terms)

            def gradient(upstream: tf.Tensor, *_: tf.Tensor):
                scale = mask * tf.cast(upstream, mask.dtype)  # (N,)
                return self._gradients(
                    chunks, [hidden, weight, *bias], labels, log_sum, scale, kept
                )

            return (tf.reduce_sum(minimised * mask), token_loss, predicted), gradient

        summed, token_loss, predicted = run(hidden, weight, *([] if bias is None else [bias]))
        return summed, tf.stop_gradient(token_loss), predicted

    def _logits(self, own: tf.Tensor, factor: tf.Tensor, bias: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns a chunk's logits (n, v), in the compute dtype."""
        logits = tf.matmul(own, factor, transpose_b=self._is_table)  # (n, v)
        if bias:
            logits = tf.nn.bias_add(logits, tf.cast(bias[0], own.dtype))
        return logits

    def _exact(self, logits: tf.Tensor) -> tf.Tensor:
        """Returns logits (n, v) as losses are made of them, padding so small that it counts 0."""
        logits = tf.cast(logits, exact_dtype(logits.dtype))
        if self._start + self._size <= self._vocab_size:
            return logits
        column = tf.range(self._start, self._start + self._size)
        return tf.where(column < self._vocab_size, logits, logits.dtype.min)

    def _places(self, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns whether a token's label is here (n,), and its column (n,), any if it is not."""
        column = labels - self._start
        here = (column >= 0) & (column < self._size)
        return here, tf.where(here, column, 0)

    def _statistics(self, logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        """Returns of each token what the others need of the logits here, (5, n)."""
        narrow, logits = logits, self._exact(logits)
        largest = tf.reduce_max(logits, axis=-1)
        best = tf.argmax(logits, axis=-1, output_type=tf.int32) + self._start
        total = tf.reduce_sum(tf.exp(logits - largest[:, tf.newaxis]), axis=-1)
        here, column = self._places(labels)
        target = tf.where(here, tf.gather(logits, column, batch_dims=1), 0.0)
        summed = tf.zeros_like(largest)
        if self._terms.label_smoothing:
            valid = self._valid_columns()
            summed = tf.reduce_sum(tf.cast(narrow[:, :valid], logits.dtype), axis=-1)
        # Ids are exact in float32 up to 2^24, so that all travel in one collective.
        return tf.stack([largest, tf.cast(best, logits.dtype), total, target, summed])

    def _valid_columns(self) -> int:
        return max(0, min(self._size, self._vocab_size - self._start))

    def _whole(
        self, columns: tf.Tensor, id_dtype: tf.DType
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns (token_loss, predicted, log_sum, mean_logit), (N,) each, of all parts."""
        parts = self._split.gather(columns, "loss")  # (parts, 5, N)
        parts = tf.ensure_shape(parts, [self._split.size, *columns.shape])
        largest = tf.reduce_max(parts[:, 0], axis=0)  # (N,)
        winner = tf.one_hot(
            tf.argmax(parts[:, 0], axis=0), self._split.size, axis=0, dtype=columns.dtype
        )
        predicted = tf.cast(tf.reduce_sum(winner * parts[:, 1], axis=0), id_dtype)
        total = tf.reduce_sum(parts[:, 2] * tf.exp(parts[:, 0] - largest), axis=0)
        # In this order, as the largest may be far from 0 and the loss near it.
        rest = tf.math.log(total)
        token_loss = rest + (largest - tf.reduce_sum(parts[:, 3], axis=0))
        mean_logit = tf.reduce_sum(parts[:, 4], axis=0) / self._vocab_size
        return token_loss, predicted, rest + largest, mean_logit

    def _gradients(
        self,
        chunks: Sequence[slice],
        arguments: Sequence[tf.Tensor],
        labels: tf.Tensor,
        log_sum: tf.Tensor,
        scale: tf.Tensor,
        kept: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Returns the gradients of hidden state, weight and bias.

        Args:
          chunks: rows of each chunk.
          arguments: hidden state, weight and, if there is one, bias.
          labels: (N,).
          log_sum: (N,), of the whole vocabulary.
          scale: (N,), of each token's loss; float16's loss scale is in it before anything is
            rounded.
          kept: the logits, where there is one chunk.
        """
        hidden, weight, *bias = arguments
        factor = tf.cast(weight, hidden.dtype)
        parts: list[tf.Tensor] = []
        totals: list[tf.Tensor] = []
        made: list[tf.Tensor] = [scale]
        for rows in chunks:
            # Also lest the logits be those of the forward pass, kept.
            with tf.control_dependencies(made):
                own = tf.identity(hidden[rows])  # (n, D)
            logits = kept[0] if len(chunks) == 1 else self._logits(own, factor, bias)
            change = self._change(logits, labels[rows], log_sum[rows], scale[rows])
            narrow = tf.cast(change, own.dtype)
            parts.append(tf.matmul(narrow, factor, transpose_b=not self._is_table))  # (n, D)
            own_totals = weight_gradients(own, narrow, self._is_table)
            if bias:
                own_totals.append(tf.reduce_sum(change, axis=0))  # (v,)
            totals = (
                [a + b for a, b in zip(totals, own_totals, strict=True)] if totals else own_totals
            )
            made = [parts[-1], *totals]
        gradients = [tf.concat(parts, 0), *totals]
        return [tf.cast(g, x.dtype) for g, x in zip(gradients, arguments, strict=True)]

    def _change(
        self, logits: tf.Tensor, labels: tf.Tensor, log_sum: tf.Tensor, scale: tf.Tensor
    ) -> tf.Tensor:
        """Returns the gradient (n, v) of a chunk's logits."""
        terms, dtype = self._terms, log_sum.dtype
        softmax = tf.exp(self._exact(logits) - log_sum[:, tf.newaxis])  # (n, v)
        factor = scale
        if terms.z_loss:
            factor *= 1.0 + tf.constant(2.0 * terms.z_loss, dtype) * log_sum
        change = softmax * factor[:, tf.newaxis]
        if terms.label_smoothing:
            valid = self._valid_columns()
            each = scale * tf.constant(terms.label_smoothing / self._vocab_size, dtype)  # (n,)
            spread = tf.repeat(each[:, tf.newaxis], valid, axis=1)  # (n, valid)
            change -= tf.pad(spread, [[0, 0], [0, self._size - valid]])
        here, column = self._places(labels)
        taken = scale * tf.constant(1.0 - terms.label_smoothing, dtype)
        place = tf.stack([tf.range(tf.size(column)), column], axis=1)  # (n, 2)
        return tf.tensor_scatter_nd_sub(change, place, tf.where(here, taken, 0.0))
