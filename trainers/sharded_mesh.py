"""Meshes without a pipeline whose data ranks share gradients (ZeRO-2), and weights too (ZeRO-3)."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfbig.checkpoint_format import Slice
from tfbig.model.context import Context
from tfbig.recomputation_mode import group_size
from tfbig.variables import variable_specs
from trainers.base import Batch, StateReader
from trainers.clock import Clock
from trainers.flat_buckets import flat_buckets
from trainers.frozen_weights import FrozenWeights
from trainers.gradients import BatchSums
from trainers.model_units import model_units, unit_buckets
from trainers.pipeline import PipelineTrainer
from trainers.pipeline_link import Intervals
from trainers.pipeline_program import Program
from trainers.sharded_optimizer import Parts, ShardedOptimizer
from trainers.sharded_step import ShardedStep, make_step
from trainers.token_history import TokenHistory, empty_history, extend, new_tokens
from trainers.unallocated import unallocated
from trainers.unit_passes import UnitPasses
from trainers.unit_state import UnitState


class ShardedMeshTrainer(PipelineTrainer):
    """Trains, in each process, one tensor shard of one replica, unit by unit."""

    def _make_parts(self, training: bool) -> dict[str, tf.Variable]:
        parallel = self.config.parallel
        self._units = model_units(
            self.config.model,
            max(1, group_size(parallel.activation_checkpointing)),
            self.config.optimizer.freeze,
        )
        self._variables: dict[str, tf.Variable] | None = None
        self._frozen: FrozenWeights | None = None
        if parallel.shard_parameters:
            make = functools.partial(self._make_model, None, initial_values=False)
            self._model = unallocated(make)
            return {}
        self._model = self._make_weights(None)
        variables = self._model.canonical_variables()
        self._variables = {path: variable.value for path, variable in variables.items()}
        return self._variables

    def _paths(self, variables: Mapping[str, tf.Variable]) -> list[str]:
        return [spec.path for spec in variable_specs(self.config.model)]

    def _make_optimizer(
        self, variables: dict[str, tf.Variable], training: bool
    ) -> ShardedOptimizer:
        sizes = {
            path: tf.TensorShape(shard.local_shape).num_elements()
            for path, shard in self._shards.items()
        }
        data = self._groups.data
        if self._variables is None:
            paths = unit_buckets(unit.frozen for unit in self._units)
            buckets = flat_buckets(sizes, paths, data.size)
            self._frozen = FrozenWeights(buckets, data, self._shards, self._initial_value)
        paths = unit_buckets(unit.trained for unit in self._units)
        buckets = flat_buckets(sizes, paths, data.size)
        optimizer = ShardedOptimizer(
            self.config, variables or None, self._shards, buckets, data, training
        )
        optimizer.begin(self._initial_value)
        return optimizer

    def _make_stepper(self) -> "ShardedStepper":
        parallel, tensor = self.config.parallel, self._groups.tensor
        assert isinstance(self._optimizer, ShardedOptimizer)
        state = UnitState(
            self._model,
            self._units,
            self._optimizer,
            self._variables,
            self._shards,
            self._frozen,
            tensor if tensor.size > 1 else None,
            parallel.sequence_parallel,
        )
        passes = [UnitPasses(self._model, unit, parallel.jit_compile) for unit in self._units]
        step = make_step(parallel, passes, state)
        return ShardedStepper(step, passes, state, self._split, parallel.microbatches)

    def _make_decoder(self) -> "HistoryDecoder":
        return HistoryDecoder(self._stepper)

    def state_slices(self) -> Iterator[Slice]:
        yield from super().state_slices()
        if self._frozen is not None:
            yield from self._frozen.slices()

    def load_state(self, reader: StateReader, weights_only: bool = False) -> list[str]:
        missing = super().load_state(reader, weights_only)
        return missing if self._frozen is None else missing + self._frozen.load(reader)

    def _take_totals(self) -> Parts:
        return self._stepper.parts

    def _averages(self) -> str:
        return "ema/"


class ShardedStepper:
    """Does for units what Stepper does for the chunks of a pipeline.

    Args:
      step: the passes of a step.
      passes: of each unit.
      state: of the units.
      split: of the tensor axis.
      num_microbatches: of a step.
    """

    def __init__(
        self,
        step: ShardedStep,
        passes: Sequence[UnitPasses],
        state: UnitState,
        split: Any,
        num_microbatches: int,
    ) -> None:
        self._step, self._passes, self._state = step, list(passes), state
        self._split, self._num_microbatches = split, num_microbatches
        self._train = tf.function(self._train_graph, autograph=False)
        self._evaluate = tf.function(self._evaluate_graph, autograph=False)
        self._decode = tf.function(self._decode_graph, autograph=False)
        self.parts: Parts = []
        self.intervals: list[Intervals] = []
        self.seconds = {"forward": 0.0, "backward": 0.0}

    def run(
        self,
        program: Program,
        batch: Batch,
        step: tf.Tensor,
        shape: Sequence[int],
        training: bool,
        loss_scale: tf.Tensor | None = None,
        weights: str | None = None,
    ) -> list[BatchSums]:
        """Returns the loss sums by microbatch; see Stepper. The gradients' parts are in `parts`."""
        if not training:
            return [self._evaluate(dict(batch), weights or "")]
        self.parts, sums, intervals = self._train(dict(batch), step, loss_scale)
        self.intervals = [intervals]
        return sums

    def decode(self, history: TokenHistory) -> tf.Tensor:
        """Returns the logits (B, V of this rank) after each row's last token."""
        return self._decode(history)

    def _train_graph(
        self, batch: Batch, step: tf.Tensor, loss_scale: tf.Tensor | None
    ) -> tuple[Parts, list[BatchSums], Intervals]:
        clock = Clock()
        parts, sums = self._step.gradients(batch, step, self._num_microbatches, loss_scale, clock)
        return parts, sums, clock.intervals()

    def _evaluate_graph(self, batch: Batch, prefix: str) -> BatchSums:
        return self._state.evaluate(self._passes, batch, prefix)

    def _decode_graph(self, history: TokenHistory) -> tf.Tensor:
        num_rows, max_length = history.tokens.shape
        context = Context(
            step=tf.constant(0, tf.int64),
            sample_index=tf.range(num_rows, dtype=tf.int64),
            position=tf.range(max_length),
            document_ids=None,
            training=False,
        )
        last = tf.maximum(history.length - 1, 0)  # (B,)
        with self._split.whole_positions():
            logits = self._state.last_logits(self._passes, history.tokens, last, context)
        return tf.cast(logits, tf.float32)


class HistoryDecoder:
    """Does what MeshDecoder does without keys and values, as weights are gathered for each step.

    Args:
      stepper: of the units.
    """

    def __init__(self, stepper: ShardedStepper) -> None:
        self._stepper = stepper
        self._extend = tf.function(extend, autograph=False)

    def new_cache(self, num_rows: int, max_length: int) -> TokenHistory:
        """Returns an empty history; arguments as for Trainer.new_cache."""
        return empty_history(num_rows, max_length)

    def step(
        self,
        tokens: np.ndarray,
        num_valid: np.ndarray,
        source_row: np.ndarray,
        reset: np.ndarray,
        cache: TokenHistory,
    ) -> tuple[tf.Tensor, TokenHistory]:
        """Returns the logits (R, V of this rank) and the history; see Trainer.decode_step."""
        cache = self._extend(cache, *new_tokens(tokens, num_valid, source_row, reset))
        return self._stepper.decode(cache), cache
