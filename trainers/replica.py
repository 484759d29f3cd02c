"""What strategies share in which every process holds the whole model."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfbig.checkpoint_format import LazyArray, Slice
from tfbig.config import Config
from tfbig.loss_scale import LossScale
from tfbig.model.gpt import GPT
from tfbig.optimizer import (
    Decision,
    Optimizer,
    decide,
    mean_norms,
    squared_norm,
    squared_norms_by_layer,
)
from tfbig.step_spans import Spans
from tfbig.variables import is_trained, variable_rule
from trainers.base import Batch, StateReader, StepResult, Trainer
from trainers.clock import Clock, seconds_in_flight
from trainers.decode_cache import DecodeCache
from trainers.decoding import Decoder
from trainers.gradients import BatchSums, batch_gradients, forward
from trainers.step_totals import pack, unpack


class Local(NamedTuple):
    """The variables of one replica, on one device."""

    variables: dict[str, tf.Variable]  # those that are trained
    frozen: dict[str, tf.Variable]
    optimizer: Any  # Optimizer, or what a strategy has in its place
    loss_scale: LossScale

    def weights(self) -> dict[str, tf.Variable]:
        """Returns all of the model's variables by canonical path."""
        return self.variables | self.frozen

    def state(self) -> dict[str, tf.Variable]:
        """Returns weights, slots and scalars by checkpoint path."""
        return self.weights() | self.optimizer.state() | self.loss_scale.state()


class ReplicaTrainer(Trainer):
    """A whole model and optimizer in this process; subclasses add how gradients are summed."""

    config: Config
    model: GPT

    def build(self, training: bool = True, num_sources: int = 1, vocab_size: int = 0) -> None:
        config = self.config
        self._num_sources = num_sources
        self._vocab_size = vocab_size or config.model.vocab_size
        self.model = self._make_model()
        self._locals = self._make_locals(self._model_variables(), training)
        self._variables = self._locals[0].variables
        self._intervals: dict[str, tf.Tensor] = {}
        self._train = tf.function(self._train_graph, autograph=False)
        self._evaluate = tf.function(self._evaluate_graph, autograph=False)
        self._decoder = Decoder(self.model, self._locals[0].weights(), self._vocab_size)

    # What a strategy adds.

    def _make_model(self, initial_values: bool = True) -> GPT:
        config = self.config
        return GPT.from_config(
            config.model,
            seed=config.run.seed,
            precision=config.parallel.precision,
            initial_values=initial_values,
            attention=config.parallel.attention,
            activation_checkpointing=config.parallel.activation_checkpointing,
            offload_horizon=config.parallel.offload_horizon,
            loss=config.loss,
        )

    def _model_variables(self) -> dict[str, tf.Variable]:
        """Returns the variables that this process trains, by path."""
        variables = self.model.canonical_variables()
        return {path: variable.value for path, variable in variables.items()}

    def _make_locals(self, variables: dict[str, tf.Variable], training: bool) -> list[Local]:
        """Returns the replicas of this process: one, of the model's own variables."""
        return [self._make_local(variables, training)]

    def _make_local(self, variables: dict[str, tf.Variable], training: bool) -> Local:
        config = self.config
        freeze = config.optimizer.freeze
        trained = {p: v for p, v in variables.items() if is_trained(p, config.model, freeze)}
        frozen = {path: v for path, v in variables.items() if path not in trained}
        decayed = {path: variable_rule(path).decayed for path in trained}
        optimizer = Optimizer(config.optimizer, trained, decayed, training)
        return Local(trained, frozen, optimizer, LossScale(config))

    def _local(self) -> Local:
        """Returns the replica that the calling graph is part of."""
        return self._locals[0]

    def _gradients(self, batch: Batch, step: tf.Tensor, clock: Clock) -> tuple[Any, BatchSums]:
        """Returns gradients summed over all ranks, and this process's sums by row."""
        local, parallel = self._local(), self.config.parallel

        def run(batch: Batch, step: tf.Tensor, loss_scale: tf.Tensor | None):
            return batch_gradients(
                self.model,
                local.variables,
                batch,
                step,
                parallel.microbatches,
                loss_scale=loss_scale,
            )

        if parallel.jit_compile:
            run = tf.function(run, autograph=False, jit_compile=True)
        return run(batch, step, local.loss_scale.of_the_sum())

    def _sum(self, vector: tf.Tensor, clock: Clock) -> tf.Tensor:
        """Returns a vector summed over all ranks."""
        return vector

    def _gather(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns the rows (b, n) of all ranks, (global batch, n)."""
        return rows

    def _sums_and_squares(
        self, vector: tf.Tensor, gradients: Any, clock: Clock
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns a vector summed over all ranks, and the reduced gradients' sums of squares.

        The latter are (1,), or (layers,) where norms by layer are asked for.
        """
        squares = [squared_norm(gradients)]
        if self.config.run.layer_grad_norms:
            squares = squared_norms_by_layer(gradients, self.config.model.num_layers)
        return self._sum(vector, clock), tf.convert_to_tensor(squares)

    def _apply(
        self, gradients: Any, learning_rate: tf.Tensor, decision: Decision, clock: Clock
    ) -> None:
        """Updates the calling replica's variables with what `_gradients` returned."""
        self._local().optimizer.apply(gradients, learning_rate, decision)

    # The contract.

    def train_step(
        self, batch: Batch, step: int, learning_rate: float, max_loss: float, signal: int
    ) -> StepResult:
        result, self._intervals = self._train(
            dict(batch),
            tf.constant(step, tf.int64),
            tf.constant(learning_rate, tf.float32),
            tf.constant(max_loss, tf.float32),
            tf.constant(signal, tf.int32),
        )
        return result

    def gradient_slices(self, batch: Batch, step: int) -> list[Slice]:
        @tf.function(autograph=False)
        def run(batch: Batch, step: tf.Tensor) -> Any:
            return self._gradients(batch, step, Clock())[0]

        return self._slices_of(run(dict(batch), tf.constant(step, tf.int64)))

    def _slices_of(self, gradients: Any) -> list[Slice]:
        """Returns what `_gradients` returned as slices of the model's variables."""
        return [
            Slice(path, tuple(g.shape), (0,) * len(g.shape), g, self.rank == 0)
            for path, g in gradients.items()
        ]

    def evaluate_step(
        self, batch: Batch, weights: str = "model"
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows = self._evaluate(dict(batch), weights).numpy()  # (global batch, 3)
        return rows[:, 0], rows[:, 1], rows[:, 2]

    def state_slices(self) -> Iterator[Slice]:
        for path, variable in self._locals[0].state().items():
            shape = tuple(variable.shape)
            array = LazyArray(shape, variable.dtype.as_numpy_dtype, variable.read_value)
            yield Slice(path, shape, (0,) * len(shape), array, self.rank == 0)

    def load_state(self, reader: StateReader, weights_only: bool = False) -> list[str]:
        local = self._locals[0]
        wanted = local.weights() if weights_only else local.state()
        missing = [path for path in wanted if not reader.has(path)]
        for path, variable in wanted.items():
            if reader.has(path):
                variable.assign(tf.cast(reader.read(path), variable.dtype))
        if weights_only:
            local.optimizer.restart_averages()
        return missing

    def new_cache(self, num_rows: int, max_length: int) -> DecodeCache:
        return self._decoder.new_cache(num_rows, max_length)

    def decode_step(
        self,
        tokens: np.ndarray,
        num_valid: np.ndarray,
        source_row: np.ndarray,
        reset: np.ndarray,
        cache: DecodeCache,
    ) -> tuple[np.ndarray, DecodeCache]:
        return self._decoder.step(tokens, num_valid, source_row, reset, cache), cache

    def timings(self) -> Callable[[], dict[str, float]]:
        intervals = self._intervals
        return lambda: {axis: seconds_in_flight(x.numpy()) for axis, x in intervals.items()}

    def spans(self) -> Callable[[], Spans]:
        intervals = self._intervals
        return lambda: {axis: x.numpy() for axis, x in intervals.items()}

    # Graphs.

    def _train_graph(
        self,
        batch: Batch,
        step: tf.Tensor,
        learning_rate: tf.Tensor,
        max_loss: tf.Tensor,
        signal: tf.Tensor,
    ) -> tuple[StepResult, dict[str, tf.Tensor]]:
        clock = Clock()
        gradients, sums = self._gradients(batch, step, clock)
        _, row_loss, row_tokens, _ = sums
        vector = pack(row_loss, row_tokens, batch["source_index"], signal, self._num_sources)
        vector, squares = self._sums_and_squares(vector, gradients, clock)
        totals = unpack(vector, self._num_sources)
        config = self.config.optimizer
        local = self._local()
        scale, scale_of_sum = local.loss_scale.value(), local.loss_scale.of_the_sum()
        decision = decide(
            config,
            tf.reduce_sum(squares),
            totals.loss_sum,
            totals.num_tokens,
            max_loss,
            scale_of_sum,
        )
        with tf.name_scope("optimizer"):  # captures of steps tell it by this
            self._apply(gradients, learning_rate, decision, clock)
        local.loss_scale.update(decision.finite)
        layer_norms = tf.zeros([0])
        if self.config.run.layer_grad_norms:
            layer_norms = mean_norms(squares, totals.num_tokens, scale_of_sum)
        result = StepResult(
            **totals._asdict(),
            grad_norm=decision.grad_norm,
            applied=decision.applied,
            loss_scale=scale,
            layer_grad_norms=layer_norms,
        )
        return result, clock.intervals()

    def _evaluate_graph(self, batch: Batch, weights: str) -> tf.Tensor:
        sums = self._evaluation_sums(batch, weights)
        return self._gather(tf.stack(sums[1:], axis=1))  # (global batch, 3)

    def _evaluation_sums(self, batch: Batch, weights: str) -> BatchSums:
        scope = keras.StatelessScope()
        if weights == "ema":
            averages = self._local().optimizer.averages()
            assert averages, "this run keeps no moving average"
            for path, variable in self.model.canonical_variables().items():
                if path in averages:  # a frozen variable is its own average
                    scope.add_update((variable, tf.convert_to_tensor(averages[path])))
        with scope if weights == "ema" else contextlib.nullcontext():
            return forward(self.model, batch, tf.constant(0, tf.int64), training=False)
