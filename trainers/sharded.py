"""Data parallelism whose ranks share what each of them would hold a copy of (ZeRO)."""

import functools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfbig.checkpoint_format import Slice
from tfbig.loss_scale import LossScale
from tfbig.model.gpt import GPT
from tfbig.model.initialization import part_value
from tfbig.optimizer import Decision
from tfbig.variables import is_trained, variable_specs
from trainers.base import Batch, StateReader
from trainers.bucket_plan import plan_buckets
from trainers.clock import Clock
from trainers.flat_buckets import FlatBucket, flat_buckets, model_sizes
from trainers.gradients import BatchSums
from trainers.horovod import FLOAT32_BYTES, HorovodTrainer
from trainers.replica import Local, ReplicaTrainer
from trainers.sharded_optimizer import Parts, ShardedOptimizer
from trainers.tensor_table import shard_table
from trainers.unallocated import stored_as_used


class ShardedTrainer(HorovodTrainer):
    """Trains a replica in each process; optimizer state is shared among all of them."""

    @property
    def whole_model(self) -> Any:
        return None

    def _make_model(self, initial_values: bool = True) -> GPT:
        """Returns the model; in 16 bits, with what of it is trained kept as it is used.

        The exact values are with the optimizer, a part on each rank.
        """
        if self.config.parallel.precision == "float32":
            return super()._make_model(initial_values)
        make = functools.partial(super()._make_model, initial_values=False)
        return stored_as_used(make, self._initial_value, self._is_trained)

    def _is_trained(self, path: str) -> bool:
        return is_trained(path, self.config.model, self.config.optimizer.freeze)

    def _initial_value(self, path: str) -> tf.Tensor:
        return part_value(self.config.model, self.config.run.seed, path)

    def _make_local(self, variables: dict[str, tf.Variable], training: bool) -> Local:
        model = self.config.model
        paths = [spec.path for spec in variable_specs(model)]
        places = {"data": self.rank, "pipeline": 0, "tensor": 0}
        sizes = {"data": self.size, "pipeline": 1, "tensor": 1}
        trained = {path: v for path, v in variables.items() if self._is_trained(path)}
        optimizer = ShardedOptimizer(
            self.config,
            trained or None,
            shard_table(model, paths, places, sizes),
            self._flat_buckets(),
            self._data,
            training,
        )
        frozen = {path: v for path, v in variables.items() if path not in trained}
        return Local(trained, frozen, optimizer, LossScale(self.config))

    def _flat_buckets(self) -> list[FlatBucket]:
        sizes = model_sizes(self.config.model)
        sizes = {path: size for path, size in sizes.items() if self._is_trained(path)}
        max_elements = (self.config.parallel.bucket_megabytes << 20) // FLOAT32_BYTES
        return flat_buckets(sizes, plan_buckets(sizes, max_elements), self.size)

    def build(self, training: bool = True, num_sources: int = 1, vocab_size: int = 0) -> None:
        super().build(training, num_sources, vocab_size)
        self._optimizer: ShardedOptimizer = self._locals[0].optimizer
        self._optimizer.begin(self._initial_value)

    def _gradients(self, batch: Batch, step: tf.Tensor, clock: Clock) -> tuple[Any, BatchSums]:
        gradients, sums = ReplicaTrainer._gradients(self, batch, step, clock)
        return self._locals[0].optimizer.reduce(gradients, clock), sums

    def _sums_and_squares(
        self, vector: tf.Tensor, gradients: Parts, clock: Clock
    ) -> tuple[tf.Tensor, tf.Tensor]:
        squares = tf.cast(self._optimizer.squares_by_layer(gradients), tf.float64)  # (layers,)
        summed = self._sum(tf.concat([squares, vector], 0), clock)
        num_layers = squares.shape[0]
        return summed[num_layers:], tf.cast(summed[:num_layers], tf.float32)

    def _apply(
        self, gradients: Parts, learning_rate: tf.Tensor, decision: Decision, clock: Clock
    ) -> None:
        self._optimizer.apply(gradients, learning_rate, decision, clock)

    def _slices_of(self, gradients: Parts) -> list[Slice]:
        return list(self._optimizer.slices_of(gradients))

    def state_slices(self) -> Iterator[Slice]:
        weights = self._variables if self._optimizer.holds_weights else {}
        for part in super().state_slices():
            if part.path not in weights:
                yield part
        yield from self._optimizer.slices()

    def load_state(self, reader: StateReader, weights_only: bool = False) -> list[str]:
        missing = super().load_state(reader, weights_only)
        missing += self._optimizer.load(reader, weights_only)
        if weights_only:
            self._optimizer.restart_averages()
        return missing
