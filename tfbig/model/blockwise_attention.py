"""Causal attention block by block: nothing of size T x T is kept, forward or backward.

Each block of queries meets the keys it may see in blocks, with a running maximum and sum of its
softmax; the backward pass makes the weights of a block again from the sum's logarithm. Blocks that
causality hides are never computed: about half of all.

Source: FlashAttention (arXiv 2205.14135, section 3.1; the backward pass is its appendix B.4).

B = batch, T = time, H = heads, d = head_dim, q = queries of a block, k = keys of a block.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import tensorflow as tf

from tfbig.model.dropout import drop, keep_mask

MAX_KEYS = 1024  # of a block
# From here on it is the faster form on CPU cores, as benchmarks/attention.py measures: 0.97x the
# speed of the plain one at 512 positions, 1.46x at 1024, 1.86x at 4096 (2 cores, float32).
FASTER_FROM = 1024


def block_sizes(num_positions: int) -> tuple[int, int]:
    """Returns (queries, keys) of a block.

    Measured on 2 cores: with smaller blocks TensorFlow's cost of an operation shows, with larger
    ones the share of masked scores that are computed does. Blocks grow with very long samples, so
    that the graph doesn't.

    >>> block_sizes(1024), block_sizes(4096), block_sizes(65536)
    ((128, 1024), (256, 1024), (1024, 1024))
    """
    smallest = 128 if num_positions <= 1024 else 256
    num_queries = max(smallest, num_positions // 64)
    return num_queries, max(MAX_KEYS, num_queries)


class _Block(NamedTuple):
    """Which queries meet which keys."""

    first: int
    stop: int
    first_key: int
    stop_key: int


class BlockwiseAttention:
    """The two passes, made once for all blocks of a model, so that they are traced once.

    Args:
      dropout_rate: share of attention weights that is dropped where there are keys for it.
      first_head: index of the first head here in the full layer, which keys its dropout.
      sizes: (queries, keys) of a block; None leaves it to `block_sizes`.
    """

    def __init__(
        self,
        dropout_rate: float = 0.0,
        first_head: int = 0,
        sizes: tuple[int, int] | None = None,
    ) -> None:
        self._rate, self._first_head, self._sizes = dropout_rate, first_head, sizes
        # Not inlined: the graph of a deep model would hold every block of every layer.
        attributes = {"_noinline": True}
        self._forward = tf.function(
            self._forward_graph, autograph=False, experimental_attributes=attributes
        )
        self._backward = tf.function(
            self._backward_graph, autograph=False, experimental_attributes=attributes
        )

    def __call__(
        self,
        query: tf.Tensor,
        key: tf.Tensor,
        value: tf.Tensor,
        document_ids: tf.Tensor | None = None,
        dropout_keys: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Returns what `tfbig.model.attention.causal_attention` returns, (B, T, H, d)."""
        if self._rate == 0.0:
            dropout_keys = None

        @tf.custom_gradient
        def attend(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor):
            output, log_sum = self._forward(query, key, value, document_ids, dropout_keys)

            def gradient(upstream: tf.Tensor):
                return self._backward(
                    query, key, value, document_ids, dropout_keys, output, log_sum, upstream
                )

            return output, gradient

        scale = tf.cast(1.0 / math.sqrt(query.shape[-1]), query.dtype)
        query, key, value = (
            tf.transpose(x, [0, 2, 1, 3]) for x in (query * scale, key, value)
        )  # (B, H, T, d)
        return tf.transpose(attend(query, key, value), [0, 2, 1, 3])  # (B, T, H, d)

    def _blocks(self, num_positions: int) -> Iterator[list[_Block]]:
        """Yields, for each block of queries, the blocks of keys that it may see."""
        num_queries, num_keys = self._sizes or block_sizes(num_positions)
        for first in range(0, num_positions, num_queries):
            stop = min(first + num_queries, num_positions)
            yield [
                _Block(first, stop, first_key, min(first_key + num_keys, stop))
                for first_key in range(0, stop, num_keys)
            ]

    def _forward_graph(
        self,
        query: tf.Tensor,
        key: tf.Tensor,
        value: tf.Tensor,
        document_ids: tf.Tensor | None,
        dropout_keys: tf.Tensor | None,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the output (B, H, T, d) and the log of each softmax's sum (B, H, T, 1)."""
        outputs: list[tf.Tensor] = []
        log_sums: list[tf.Tensor] = []
        made: list[tf.Tensor] = []
        for row in self._blocks(query.shape[2]):
            top = total = output = None
            for block in row:
                # One block after the other, or the scores of all would exist at a time.
                with tf.control_dependencies(made):
                    own = tf.identity(query[:, :, block.first : block.stop])
                keys, values = (x[:, :, block.first_key : block.stop_key] for x in (key, value))
                scores = _scores(own, keys, block, document_ids)  # (B, H, q, k)
                largest = tf.reduce_max(scores, axis=-1, keepdims=True)  # (B, H, q, 1)
                if query.dtype == tf.float16:
                    # Weights that sum to at most 1 in a block, as the plain form's: the products
                    # with the values stay in float16's range.
                    largest += math.log(block.stop_key - block.first_key)
                if top is None:
                    weights = tf.exp(scores - largest)
                    total = tf.reduce_sum(weights, axis=-1, keepdims=True)
                    output = self._product(weights, values, block, dropout_keys, key.shape[2])
                    top = largest
                else:
                    new_top = tf.maximum(top, largest)
                    shrink = tf.exp(top - new_top)  # (B, H, q, 1)
                    weights = tf.exp(scores - new_top)
                    total = total * shrink + tf.reduce_sum(weights, axis=-1, keepdims=True)
                    product = self._product(weights, values, block, dropout_keys, key.shape[2])
                    output, top = output * shrink + product, new_top
                made = [output, total]
            assert output is not None  # each row has a block: its own
            outputs.append(tf.cast(output / total, value.dtype))
            log_sums.append(top + tf.math.log(total))
        return tf.concat(outputs, 2), tf.concat(log_sums, 2)

    def _product(
        self,
        weights: tf.Tensor,
        values: tf.Tensor,
        block: _Block,
        dropout_keys: tf.Tensor | None,
        num_positions: int,
    ) -> tf.Tensor:
        """Returns the dropped weights (B, H, q, k) times the values, (B, H, q, d)."""
        weights = self._drop(weights, block, dropout_keys, num_positions)
        product = tf.matmul(tf.cast(weights, values.dtype), values)
        return tf.cast(product, weights.dtype)

    def _backward_graph(
        self,
        query: tf.Tensor,
        key: tf.Tensor,
        value: tf.Tensor,
        document_ids: tf.Tensor | None,
        dropout_keys: tf.Tensor | None,
        output: tf.Tensor,
        log_sum: tf.Tensor,
        upstream: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns the gradients of query, key and value, (B, H, T, d) each."""
        num_positions, dtype = key.shape[2], log_sum.dtype
        # What the gradients of a row's weights have in common (the paper's D).
        common = tf.cast(upstream, dtype) * tf.cast(output, dtype)
        common = tf.reduce_sum(common, axis=-1, keepdims=True)  # (B, H, T, 1)
        query_parts: list[tf.Tensor] = []
        key_parts: dict[int, tf.Tensor] = {}
        value_parts: dict[int, tf.Tensor] = {}
        made: list[tf.Tensor] = []
        # From the end, so that the first part of each block of keys is its longest.
        for row in reversed(list(self._blocks(num_positions))):
            query_part = None
            for block in row:
                queries = slice(block.first, block.stop)
                with tf.control_dependencies(made):
                    own = tf.identity(query[:, :, queries])  # (B, H, q, d)
                arriving = upstream[:, :, queries]  # (B, H, q, d)
                keys, values = (x[:, :, block.first_key : block.stop_key] for x in (key, value))
                weights = tf.exp(_scores(own, keys, block, document_ids) - log_sum[:, :, queries])
                dropped = self._drop(weights, block, dropout_keys, num_positions)
                change = tf.cast(tf.matmul(arriving, values, transpose_b=True), dtype)
                change = self._drop(change, block, dropout_keys, num_positions)
                change = tf.cast(weights * (change - common[:, :, queries]), key.dtype)
                part = tf.cast(tf.matmul(change, keys), dtype)  # (B, H, q, d)
                query_part = part if query_part is None else query_part + part
                _add(key_parts, block.first_key, tf.matmul(change, own, transpose_a=True), dtype)
                product = tf.matmul(tf.cast(dropped, value.dtype), arriving, transpose_a=True)
                _add(value_parts, block.first_key, product, dtype)
                made = [query_part, key_parts[block.first_key], value_parts[block.first_key]]
            query_parts.append(query_part)
        first_keys = sorted(key_parts)
        return (
            tf.cast(tf.concat(query_parts[::-1], 2), query.dtype),
            tf.cast(tf.concat([key_parts[first] for first in first_keys], 2), key.dtype),
            tf.cast(tf.concat([value_parts[first] for first in first_keys], 2), value.dtype),
        )

    def _drop(
        self, x: tf.Tensor, block: _Block, dropout_keys: tf.Tensor | None, num_positions: int
    ) -> tf.Tensor:
        """Returns x (B, H, q, k) with the block's part of the layer's dropout mask."""
        if dropout_keys is None:
            return x
        head = tf.cast(tf.range(self._first_head, self._first_head + x.shape[1]), tf.uint32)
        row = tf.cast(tf.range(block.first, block.stop), tf.uint32)
        column = tf.cast(tf.range(block.first_key, block.stop_key), tf.uint32)
        length, square = (
            tf.constant(n % (1 << 32), tf.uint32) for n in (num_positions, num_positions**2)
        )
        index = head[:, tf.newaxis, tf.newaxis] * square + row[:, tf.newaxis] * length + column
        mask = keep_mask(dropout_keys, index, self._rate)  # (B, H, q, k)
        return drop(x, mask, self._rate)


def _scores(
    query: tf.Tensor, keys: tf.Tensor, block: _Block, document_ids: tf.Tensor | None
) -> tf.Tensor:
    """Returns masked scores (B, H, q, k) in float32, or float64 where the inputs are.

    A row that sees nothing of a block gets equal weights there; its own position, in a later
    block, then shrinks them to nothing.
    """
    dtype = tf.float64 if query.dtype == tf.float64 else tf.float32
    scores = tf.cast(tf.matmul(query, keys, transpose_b=True), dtype)
    visible = None
    if block.stop_key - 1 > block.first:
        position = tf.range(block.first, block.stop)[:, tf.newaxis]
        visible = position >= tf.range(block.first_key, block.stop_key)  # (q, k)
    if document_ids is not None:
        own = document_ids[:, block.first : block.stop, tf.newaxis]
        same = own == document_ids[:, tf.newaxis, block.first_key : block.stop_key]
        same = same[:, tf.newaxis]  # (B, 1, q, k)
        visible = same if visible is None else visible & same
    return scores if visible is None else tf.where(visible, scores, dtype.min)


def _add(parts: dict[int, tf.Tensor], first_key: int, part: tf.Tensor, dtype: tf.DType) -> None:
    """Adds (B, H, k, d) to a block of keys, whose last keys may be missing from it."""
    part = tf.cast(part, dtype)
    if first_key in parts:
        missing = parts[first_key].shape[2] - part.shape[2]
        if missing:
            part = tf.pad(part, [[0, 0], [0, 0], [0, missing], [0, 0]])
        part = parts[first_key] + part
    parts[first_key] = part
