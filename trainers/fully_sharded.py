"""Data parallelism whose ranks share gradients (ZeRO-2), and weights too (ZeRO-3)."""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfbig.checkpoint_format import Slice
from tfbig.model.context import Context
from tfbig.model.gpt import GPT
from tfbig.recomputation_mode import group_size
from trainers.base import Batch, StateReader
from trainers.clock import Clock
from trainers.flat_buckets import FlatBucket, flat_buckets, model_sizes
from trainers.frozen_weights import FrozenWeights
from trainers.gradients import BatchSums
from trainers.model_units import model_units, unit_buckets
from trainers.sharded import ShardedTrainer
from trainers.sharded_optimizer import Parts
from trainers.sharded_step import ShardedStep, make_step
from trainers.token_history import TokenHistory, empty_history, extend, new_tokens
from trainers.unallocated import unallocated
from trainers.unit_passes import UnitPasses
from trainers.unit_state import UnitState


class GradientShardedTrainer(ShardedTrainer):
    """Holds all weights, but of the summed gradients and the optimizer's state only a part."""

    def build(self, training: bool = True, num_sources: int = 1, vocab_size: int = 0) -> None:
        parallel = self.config.parallel
        self._units = model_units(
            self.config.model,
            max(1, group_size(parallel.activation_checkpointing)),
            self.config.optimizer.freeze,
        )
        super().build(training, num_sources, vocab_size)
        self._unit_state = UnitState(
            self.model,
            self._units,
            self._optimizer,
            self._locals[0].weights() or None,
            self._optimizer.shards,
            self._make_frozen(),
        )
        self._passes = [UnitPasses(self.model, unit, parallel.jit_compile) for unit in self._units]
        self._step: ShardedStep = make_step(parallel, self._passes, self._unit_state)

    def _make_frozen(self) -> FrozenWeights | None:
        """Returns the weights that are not trained where ranks share them."""
        return None

    def _flat_buckets(self) -> list[FlatBucket]:
        paths = unit_buckets(unit.trained for unit in self._units)
        return flat_buckets(model_sizes(self.config.model), paths, self.size)

    def _gradients(self, batch: Batch, step: tf.Tensor, clock: Clock) -> tuple[Parts, BatchSums]:
        scale = self._locals[0].loss_scale.of_the_sum()
        parts, sums = self._step.gradients(
            batch, step, self.config.parallel.microbatches, scale, clock
        )
        return parts, BatchSums(
            tf.add_n([one.loss_sum for one in sums]),
            *(tf.concat(rows, 0) for rows in list(zip(*sums, strict=True))[1:]),
        )


class ParameterShardedTrainer(GradientShardedTrainer):
    """Holds a part of everything; a unit's weights are gathered before its use."""

    def build(self, training: bool = True, num_sources: int = 1, vocab_size: int = 0) -> None:
        super().build(training, num_sources, vocab_size)
        self._decode = tf.function(self._decode_graph, autograph=False)

    def _make_model(self, initial_values: bool = True) -> GPT:
        make = functools.partial(super(ShardedTrainer, self)._make_model, initial_values=False)
        return unallocated(make)

    def _model_variables(self) -> dict[str, tf.Variable]:
        return {}

    def _make_frozen(self) -> FrozenWeights:
        paths = unit_buckets(unit.frozen for unit in self._units)
        buckets = flat_buckets(model_sizes(self.config.model), paths, self.size)
        shards = self._optimizer.shards
        self._frozen = FrozenWeights(buckets, self._data, shards, self._initial_value)
        return self._frozen

    def state_slices(self) -> Iterator[Slice]:
        yield from super().state_slices()
        yield from self._frozen.slices()

    def load_state(self, reader: StateReader, weights_only: bool = False) -> list[str]:
        return super().load_state(reader, weights_only) + self._frozen.load(reader)

    def _evaluation_sums(self, batch: Batch, weights: str) -> BatchSums:
        prefix = "ema/" if weights == "ema" else ""
        return self._unit_state.evaluate(self._passes, batch, prefix)

    # Weights are gathered for a pass and gone after it, which a cache of keys and values for one
    # token a step would pay for anew each time: the history of tokens is the cache.

    def new_cache(self, num_rows: int, max_length: int) -> Any:
        return empty_history(num_rows, max_length)

    def decode_step(
        self,
        tokens: np.ndarray,
        num_valid: np.ndarray,
        source_row: np.ndarray,
        reset: np.ndarray,
        cache: Any,
    ) -> tuple[np.ndarray, Any]:
        arguments = new_tokens(tokens, num_valid, source_row, reset)
        logits, cache = self._decode(cache, *arguments)
        return logits.numpy(), cache

    def _decode_graph(
        self, cache: TokenHistory, *arguments: tf.Tensor
    ) -> tuple[tf.Tensor, TokenHistory]:
        cache = extend(cache, *arguments)
        num_rows, max_length = cache.tokens.shape
        context = Context(
            step=tf.constant(0, tf.int64),
            sample_index=tf.range(num_rows, dtype=tf.int64),
            position=tf.range(max_length),
            document_ids=None,
            training=False,
        )
        last = tf.maximum(cache.length - 1, 0)  # (B,)
        logits = self._unit_state.last_logits(self._passes, cache.tokens, last, context)  # (B, V)
        logits = tf.cast(logits, tf.float32)
        known = tf.range(logits.shape[-1]) < self._vocab_size
        return tf.where(known, logits, -np.inf), cache
