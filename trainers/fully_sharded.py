"""Data parallelism whose ranks share gradients (ZeRO-2), and weights too (ZeRO-3)."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfbig.model.context import Context
from tfbig.model.gpt import GPT
from tfbig.recomputation_mode import group_size
from trainers.base import Batch
from trainers.clock import Clock
from trainers.flat_buckets import FlatBucket, flat_buckets, model_sizes
from trainers.gradients import BatchSums
from trainers.model_units import model_units, unit_buckets
from trainers.sharded import ShardedTrainer
from trainers.sharded_optimizer import Parts
from trainers.sharded_step import ShardedStep
from trainers.token_history import TokenHistory, empty_history, extend, new_tokens
from trainers.unallocated import unallocated
from trainers.unit_passes import UnitPasses


class GradientShardedTrainer(ShardedTrainer):
    """Holds all weights, but of the summed gradients and the optimizer's state only a part."""

    def build(self, training: bool = True, num_sources: int = 1, vocab_size: int = 0) -> None:
        parallel = self.config.parallel
        recomputed = group_size(parallel.activation_checkpointing)
        self._units = model_units(self.config.model, max(1, recomputed))
        super().build(training, num_sources, vocab_size)
        self._passes = [UnitPasses(self.model, unit, parallel.jit_compile) for unit in self._units]
        self._step = ShardedStep(
            self._passes,
            self._unit_weights,
            self._reduce_unit,
            recomputed > 0,
            parallel.offload_horizon,
        )

    def _flat_buckets(self) -> list[FlatBucket]:
        return flat_buckets(model_sizes(self.config.model), unit_buckets(self._units), self.size)

    def _buckets_of(self, unit: int) -> list[int]:
        """Returns the buckets that a unit's variables lie in."""
        paths = self._units[unit].paths
        buckets = enumerate(self._optimizer.buckets)
        return [index for index, bucket in buckets if bucket.paths[0] in paths]

    def _unit_weights(
        self, unit: int, after: Sequence[tf.Tensor], name: str, clock: Clock | None
    ) -> list[tf.Tensor]:
        """Returns a unit's weights as the layers compute with them."""
        with tf.control_dependencies(list(after)):
            values = {
                path: tf.identity(self._variables[path].read_value())
                for path in self._units[unit].paths
            }
        return self._in_order(unit, values)

    def _in_order(self, unit: int, values: Mapping[str, tf.Tensor]) -> list[tf.Tensor]:
        paths = self._units[unit].paths
        return list(self.model.compute_weights({path: values[path] for path in paths}).values())

    def _reduce_unit(
        self, unit: int, gradients: Mapping[str, tf.Tensor], name: str, clock: Clock | None
    ) -> dict[int, tf.Tensor]:
        return {
            index: self._optimizer.reduce_bucket(index, gradients, f"{name}_{unit}_{index}", clock)
            for index in self._buckets_of(unit)
        }

    def _gradients(self, batch: Batch, step: tf.Tensor, clock: Clock) -> tuple[Parts, BatchSums]:
        local = self._locals[0]
        totals, sums = self._step.gradients(
            batch,
            step,
            self.config.parallel.microbatches,
            local.loss_scale.of_the_sum(),
            clock,
        )
        return [totals[index] for index in sorted(totals)], sums


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

    def _unit_weights(
        self,
        unit: int,
        after: Sequence[tf.Tensor],
        name: str,
        clock: Clock | None,
        prefix: str = "",
    ) -> list[tf.Tensor]:
        values: dict[str, tf.Tensor] = {}
        for index in self._buckets_of(unit):
            full_name = f"{name}_{unit}_{index}"
            values |= self._optimizer.gather_bucket(index, full_name, after, clock, prefix)
        return self._in_order(unit, values)

    def _evaluation_sums(self, batch: Batch, weights: str) -> BatchSums:
        prefix = "ema/" if weights == "ema" else ""
        step = tf.constant(0, tf.int64)  # of no dropout
        entering: list[tf.Tensor] = []  # what the next weights wait for
        hidden: Any = None
        for index, passes in enumerate(self._passes):
            own = self._unit_weights(index, entering, f"evaluation_{weights}", None, prefix)
            entering = [] if hidden is None else [hidden]
            hidden = passes.run(own, hidden, step, batch, training=False)
        return hidden

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
        logits = tf.cast(self._last_logits(cache.tokens, last, context), tf.float32)  # (B, V)
        known = tf.range(logits.shape[-1]) < self._vocab_size
        return tf.where(known, logits, -np.inf), cache

    def _last_logits(self, tokens: tf.Tensor, last: tf.Tensor, context: Context) -> tf.Tensor:
        entering: list[tf.Tensor] = []
        hidden: Any = None
        for index, passes in enumerate(self._passes):
            with passes.scope(self._unit_weights(index, entering, "decoding", None)):
                entering = [] if hidden is None else [hidden]
                hidden = passes.hidden(hidden, tokens, context)
                if passes.unit.has_head:
                    hidden = tf.gather(hidden, last, batch_dims=1)  # (B, D)
                    hidden = self.model.logits(hidden[:, tf.newaxis])[:, 0]  # (B, V)
        return hidden
