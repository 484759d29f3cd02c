"""Decoding on one device: the step that reads a cache and gives each row's next logits.

B = R = rows, b = those computed, N = new tokens of a row, D = width, V = vocabulary.
A model that is cut over devices has one of these on each (trainers/mesh_decoding.py).
"""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfbig.model.cached_attention import CacheView
from tfbig.model.context import Context
from tfbig.model.gpt import GPT
from trainers.decode_cache import CacheShape, DecodeCache, Store, make_store


class Feed(NamedTuple):
    """What one step computes."""

    tokens: np.ndarray  # (b, N) int32
    num_valid: np.ndarray  # (R,) int32
    rows: np.ndarray  # (b,) int32, those that are computed


class Decoder:
    """Feeds tokens, or what the stage before made of them, to a model and its cache.

    A step of one token a row always computes all rows, and a wider one only those that have new
    tokens: both are one compiled function each, of any width and length. A row's logits are then
    the same bits whatever its neighbours are, as long as it is fed in the same pieces and its wider
    pieces come one row at a time. A shard of a tensor group has a function for each width, as its
    collectives have one shape each.

    Args:
      model: whole, or a stage or shard of one.
      values: its variables by canonical path, in forward order.
      vocab_size: ids from here on get -inf; None leaves a shard's logits as they are.
    """

    def __init__(
        self, model: GPT, values: Mapping[str, tf.Variable], vocab_size: int | None
    ) -> None:
        self._model, self._values, self._vocab_size = model, values, vocab_size
        self._functions: dict[tuple, tf.types.experimental.ConcreteFunction] = {}

    def new_cache(
        self, num_rows: int, max_length: int, make: Callable[[CacheShape], Store] = make_store
    ) -> DecodeCache:
        """Returns an empty cache.

        Where the model computes in another dtype than its variables have, the cache keeps a copy
        of the weights as they are now.

        Args:
          num_rows: rows R.
          max_length: tokens a row can hold.
          make: makes what keeps keys and values.
        """
        model, config = self._model, self._model.config
        dtype = tf.as_dtype(model.compute_dtype)
        _, num_heads = model.split.part(config.num_heads)
        shape = CacheShape(
            num_rows,
            max_length,
            len(model.transformer_blocks),
            num_heads,
            config.attention_head_dim,
            np.dtype(dtype.as_numpy_dtype),
        )
        weights = [] if dtype == tf.float32 else self._compute_weights(dtype)
        return DecodeCache(shape, config.embed_dim, weights, make(shape))

    def step(
        self,
        tokens: np.ndarray,
        num_valid: np.ndarray,
        source_row: np.ndarray,
        reset: np.ndarray,
        cache: DecodeCache,
    ) -> np.ndarray:
        """Returns the logits (B, V) float32; arguments as for Trainer.decode_step."""
        feed = self.begin(tokens, num_valid, source_row, reset, cache)
        return self.run(feed, tf.constant(feed.tokens), cache).numpy()

    def begin(
        self,
        tokens: np.ndarray,
        num_valid: np.ndarray,
        source_row: np.ndarray,
        reset: np.ndarray,
        cache: DecodeCache,
    ) -> Feed:
        """Prepares the cache for a step and returns what it computes; arguments as for `step`."""
        tokens, num_valid = np.asarray(tokens, np.int32), np.asarray(num_valid, np.int32)
        cache.begin(np.asarray(source_row), np.asarray(reset, bool), num_valid)
        rows = np.arange(len(tokens), dtype=np.int32)
        if tokens.shape[1] > 1 and not num_valid.all():
            rows = np.flatnonzero(num_valid).astype(np.int32)
            if not rows.size:  # nothing is new: any width does
                rows, tokens = np.arange(len(tokens), dtype=np.int32), tokens[:, :1]
        return Feed(tokens[rows], num_valid, rows)

    def run(self, feed: Feed, entering: tf.Tensor, cache: DecodeCache) -> tf.Tensor:
        """Returns the logits (R, V) float32, or the hidden state (b, N, D) that leaves a stage.

        Args:
          feed: of `begin`.
          entering: its tokens, or the hidden state (b, N, D) that leaves the stage before.
          cache: of the same `begin`; the new tokens are added to it.
        """
        num_blocks = cache.num_blocks()
        cached = cache.store.tensors(num_blocks)
        run = self._function(feed, cache, cached)
        leaving, cache.last_hidden, new = run(
            entering,
            tf.constant(feed.num_valid[feed.rows]),
            tf.constant(cache.length[feed.rows]),
            tf.constant(feed.rows),
            tf.constant(num_blocks),
            cache.last_hidden,
            cache.weights,
            cached,
        )
        cache.extend(new, feed.rows, feed.num_valid)
        return leaving

    @property
    def num_traces(self) -> int:
        """How often a step was traced."""
        return len(self._functions)

    def _function(
        self, feed: Feed, cache: DecodeCache, cached: list[tf.Tensor]
    ) -> tf.types.experimental.ConcreteFunction:
        """Returns the compiled step: one for all rows, one for some of them."""
        all_rows = len(feed.rows) == len(feed.num_valid)
        shape = feed.tokens.shape if self._model.split.size > 1 else (None, None)
        name = (all_rows, cached[0].dtype, *shape)
        if name not in self._functions:
            vector = tf.TensorSpec(shape[:1], tf.int32)
            *_, num_heads, block_length, head_dim = cache.shape.array_shape
            store = [None, None, num_heads, block_length, head_dim]
            whole = [2 * cache.shape.num_layers] if len(cached) == 1 else []
            blocks = tf.TensorSpec([*whole, *store], cached[0].dtype)
            tokens = tf.TensorSpec(shape, tf.int32)
            hidden = tf.TensorSpec(
                [*shape, self._model.config.embed_dim], self._model.compute_dtype
            )
            signature = (
                tokens if self._model.has_embedding else hidden,
                vector,
                vector,
                vector,
                tf.TensorSpec([], tf.int32),
                tf.TensorSpec([None, cache.last_hidden.shape[1]], cache.last_hidden.dtype),
                [tf.TensorSpec(weight.shape, weight.dtype) for weight in cache.weights],
                [blocks] * len(cached),
            )
            # The concrete function itself: nothing is looked up at each step.
            self._functions[name] = tf.function(
                functools.partial(self._graph, all_rows), input_signature=signature, autograph=False
            ).get_concrete_function()
        return self._functions[name]

    def _compute_weights(self, dtype: tf.DType) -> list[tf.Tensor]:
        # A trainer's trained variables may come first: `_graph` takes them in the model's order.
        paths = self._model.canonical_variables()
        weights = self._model.compute_weights({path: self._values[path] for path in paths})
        # Tables are cast where they are read: here once, and not at each step.
        return [
            tf.cast(value, dtype) if path.endswith("/embeddings") else tf.convert_to_tensor(value)
            for path, value in weights.items()
        ]

    def _graph(
        self,
        all_rows: bool,
        entering: tf.Tensor,
        num_valid: tf.Tensor,
        length: tf.Tensor,
        rows: tf.Tensor,
        num_blocks: tf.Tensor,
        last_hidden: tf.Tensor,
        weights: list[tf.Tensor],
        cached: list[tf.Tensor],
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns (what `run` does, last_hidden (R, D), new keys and values (2 L, b, N, H, d))."""
        model = self._model
        variables = list(model.canonical_variables().values()) if weights else []
        with keras.StatelessScope() as scope, model.split.whole_positions():
            for pair in zip(variables, weights, strict=True):
                scope.add_update(pair)
            view = self._view(length, rows, num_blocks, cached, all_rows)
            offset = tf.range(tf.shape(entering)[1])  # (N,)
            context = Context(
                step=tf.constant(0, tf.int64),
                sample_index=tf.cast(rows, tf.int64),
                # What stands behind a row's last token may be beyond the table; nobody reads it.
                position=tf.minimum(length[:, tf.newaxis] + offset, model.config.max_length - 1),
                document_ids=None,
                training=False,
                cache=view,
            )
            hidden = model.embed(entering, context) if model.has_embedding else entering
            leaving = model.run_blocks(hidden, context)  # (b, N, D)
            if model.has_head:
                last_hidden = _last(leaving, num_valid, rows, last_hidden, all_rows)
                leaving = tf.cast(model.last_logits(last_hidden), tf.float32)  # (R, V)
        if model.has_head and self._vocab_size is not None:
            known = tf.range(leaving.shape[-1]) < self._vocab_size
            leaving = tf.where(known, leaving, -np.inf)
        new = [view.new[block.index] for block in model.transformer_blocks]
        new_keys, new_values = zip(*new, strict=True)
        return leaving, last_hidden, tf.stack([*new_keys, *new_values])

    def _view(
        self,
        length: tf.Tensor,
        rows: tf.Tensor,
        num_blocks: tf.Tensor,
        cached: list[tf.Tensor],
        all_rows: bool,
    ) -> CacheView:
        """Returns what the blocks of the model see of the cache."""
        used = []
        for part in tf.unstack(cached[0]) if len(cached) == 1 else cached:
            part = part[:num_blocks]  # (C, R, H, K, d): the same memory
            if part.dtype == tf.uint16:
                part = tf.bitcast(part, self._model.compute_dtype)
            used.append(part if all_rows else tf.gather(part, rows, axis=1))
        blocks = self._model.transformer_blocks
        keys, values = used[: len(blocks)], used[len(blocks) :]
        return CacheView(
            {block.index: key for block, key in zip(blocks, keys, strict=True)},
            {block.index: value for block, value in zip(blocks, values, strict=True)},
            length,
        )


def _last(
    hidden: tf.Tensor, num_valid: tf.Tensor, rows: tf.Tensor, before: tf.Tensor, all_rows: bool
) -> tf.Tensor:
    """Returns the hidden state (R, D) of each row's last token: new ones here, the others before.

    Args:
      hidden: (b, N, D).
      num_valid: (b,), how many of the N are new.
      rows: (b,), which rows these are.
      before: (R, D).
      all_rows: whether b is R.
    """
    last = tf.gather(hidden, tf.maximum(num_valid - 1, 0), batch_dims=1)  # (b, D)
    own = before if all_rows else tf.gather(before, rows)
    last = tf.where(num_valid[:, tf.newaxis] > 0, last, own)
    return last if all_rows else tf.tensor_scatter_nd_update(before, rows[:, tf.newaxis], last)
