"""Decoding on one device: the step that reads a cache and gives each row's next logits.

B = R = rows, b = those computed, N = new tokens of a row, D = width, V = vocabulary.
"""

import functools
from collections.abc import Callable, Mapping

import keras
import numpy as np
import tensorflow as tf

from tfbig.model.cached_attention import CacheView
from tfbig.model.context import Context
from tfbig.model.gpt import GPT
from trainers.decode_cache import CacheShape, DecodeCache, Store, make_store


class Decoder:
    """Feeds tokens to a model and its cache.

    A step of one token a row always computes all rows, and a wider one only those that have new
    tokens: both are one compiled function each, of any width and length. A row's logits are then
    the same bits whatever its neighbours are, as long as it is fed in the same pieces and its wider
    pieces come one row at a time.

    Args:
      model: whole.
      values: its variables by canonical path.
      vocab_size: ids from here on get -inf.
    """

    def __init__(self, model: GPT, values: Mapping[str, tf.Variable], vocab_size: int) -> None:
        self._model, self._values, self._vocab_size = model, values, vocab_size
        self._functions: dict[tuple[bool, tf.DType], tf.types.experimental.ConcreteFunction] = {}

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
        tokens, num_valid = np.asarray(tokens, np.int32), np.asarray(num_valid, np.int32)
        cache.begin(np.asarray(source_row), np.asarray(reset, bool), num_valid)
        rows = np.arange(len(tokens), dtype=np.int32)
        if tokens.shape[1] > 1 and not num_valid.all():
            rows = np.flatnonzero(num_valid).astype(np.int32)
            if not rows.size:  # nothing is new: any width does
                rows, tokens = np.arange(len(tokens), dtype=np.int32), tokens[:, :1]
        num_blocks = cache.num_blocks()
        cached = cache.store.tensors(num_blocks)
        run = self._function(len(rows) == len(num_valid), cache, cached)
        logits, cache.last_hidden, new = run(
            tf.constant(tokens[rows]),
            tf.constant(num_valid[rows]),
            tf.constant(cache.length[rows]),
            tf.constant(rows),
            tf.constant(num_blocks),
            cache.last_hidden,
            cache.weights,
            cached,
        )
        cache.extend(new, rows, num_valid)
        return logits.numpy()

    @property
    def num_traces(self) -> int:
        """How often a step was traced."""
        return len(self._functions)

    def _function(
        self, all_rows: bool, cache: DecodeCache, cached: list[tf.Tensor]
    ) -> tf.types.experimental.ConcreteFunction:
        """Returns the compiled step: one for all rows, one for some of them."""
        name = (all_rows, cached[0].dtype)
        if name not in self._functions:
            vector = tf.TensorSpec([None], tf.int32)
            *_, num_heads, block_length, head_dim = cache.shape.array_shape
            shape = [None, None, num_heads, block_length, head_dim]
            whole = [2 * cache.shape.num_layers] if len(cached) == 1 else []
            blocks = tf.TensorSpec([*whole, *shape], cached[0].dtype)
            signature = (
                tf.TensorSpec([None, None], tf.int32),
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
        weights = self._model.compute_weights(self._values)
        # Tables are cast where they are read: here once, and not at each step.
        return [
            tf.cast(value, dtype) if path.endswith("/embeddings") else tf.convert_to_tensor(value)
            for path, value in weights.items()
        ]

    def _graph(
        self,
        all_rows: bool,
        tokens: tf.Tensor,
        num_valid: tf.Tensor,
        length: tf.Tensor,
        rows: tf.Tensor,
        num_blocks: tf.Tensor,
        last_hidden: tf.Tensor,
        weights: list[tf.Tensor],
        cached: list[tf.Tensor],
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns (logits (R, V), last_hidden (R, D), new keys and values (2 L, b, N, H, d))."""
        model = self._model
        variables = list(model.canonical_variables().values()) if weights else []
        with keras.StatelessScope() as scope:
            for pair in zip(variables, weights, strict=True):
                scope.add_update(pair)
            view = self._view(length, rows, num_blocks, cached, all_rows)
            offset = tf.range(tf.shape(tokens)[1])  # (N,)
            context = Context(
                step=tf.constant(0, tf.int64),
                sample_index=tf.cast(rows, tf.int64),
                # What stands behind a row's last token may be beyond the table; nobody reads it.
                position=tf.minimum(length[:, tf.newaxis] + offset, model.config.max_length - 1),
                document_ids=None,
                training=False,
                cache=view,
            )
            hidden = model.hidden_state(tokens, context)  # (b, N, D)
            last = tf.gather(hidden, tf.maximum(num_valid - 1, 0), batch_dims=1)  # (b, D)
            before = last_hidden if all_rows else tf.gather(last_hidden, rows)
            last = tf.where(num_valid[:, tf.newaxis] > 0, last, before)
            if not all_rows:
                last = tf.tensor_scatter_nd_update(last_hidden, rows[:, tf.newaxis], last)
            logits = model.last_logits(last)  # (R, V)
        known = tf.range(logits.shape[-1]) < self._vocab_size
        logits = tf.where(known, tf.cast(logits, tf.float32), -np.inf)
        new = [view.new[block.index] for block in model.transformer_blocks]
        new_keys, new_values = zip(*new, strict=True)
        return logits, last, tf.stack([*new_keys, *new_values])

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
