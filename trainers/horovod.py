"""Data parallelism by Horovod: one process a device, gradients summed by all-reduce."""

from typing import Any

import numpy as np
import tensorflow as tf

from tfbig.config import Config, replace_fields
from trainers.agreement import check_equal_ranks
from trainers.base import Batch
from trainers.bucket_plan import plan_buckets
from trainers.buckets import flatten, unflatten
from trainers.clock import Clock
from trainers.collectives import Engine, distributed_tape
from trainers.devices import prepare_devices
from trainers.gradients import BatchSums, Gradients, batch_gradients
from trainers.replica import ReplicaTrainer
from trainers.replica_check import ReplicaCheck
from trainers.validate import (
    check_data_parallel_only,
    check_gradient_reduction,
    check_one_device,
    gradient_reduction,
)

FLOAT32_BYTES = 4


class HorovodTrainer(ReplicaTrainer):
    """Trains a replica in each process that horovodrun started; alone, it is a world of one."""

    def __init__(self, config: Config) -> None:
        check_data_parallel_only(config)
        check_one_device(config)
        check_gradient_reduction(config)
        self.config = config
        self._reduction = gradient_reduction(config.parallel)
        # Horovod starts before TensorFlow touches a device, so that each process can pin its own.
        self._engine = Engine(
            deterministic=config.parallel.deterministic,
            hang_timeout=config.robustness.hang_timeout,
        )
        self.rank = self.data_rank = self._engine.rank
        self.size = self.data_size = self.num_replicas = self._engine.size
        self.local_rank, self.local_size = self._engine.local_rank, self._engine.local_size
        prepare_devices(config.parallel, self.local_rank, self.local_size)
        check_equal_ranks(self._engine.differs, config)
        self._data = self._engine.everyone("data")

    def set_microbatches(self, microbatches: int) -> None:
        """Changes the forward passes of a step; before `build`."""
        self.config = replace_fields(self.config, {"microbatches": microbatches})
        self._reduction = gradient_reduction(self.config.parallel)

    @property
    def whole_model(self) -> Any:
        return self.model

    def agree(self, value: int, op: str) -> int:
        return self._engine.agree(value, op)

    def gather(self, values: np.ndarray) -> np.ndarray:
        return self._engine.gather(values)

    def broadcast(self, array: np.ndarray, root: int = 0) -> np.ndarray:
        return self._engine.broadcast(array, root)

    def barrier(self, timeout: float) -> None:
        self._engine.barrier(timeout)

    def build(self, training: bool = True, num_sources: int = 1, vocab_size: int = 0) -> None:
        super().build(training, num_sources, vocab_size)
        self._shapes = {path: variable.shape for path, variable in self._variables.items()}
        sizes = {path: shape.num_elements() for path, shape in self._shapes.items()}
        max_elements = (self.config.parallel.bucket_megabytes << 20) // FLOAT32_BYTES
        self._buckets = plan_buckets(sizes, max_elements)
        # The optimizer's slots exist by now: what is made later would not be broadcast.
        self._broadcast_state()
        weights = self._locals[0].weights()  # none where ranks share them
        self._replica_check = ReplicaCheck(self._engine, list(weights), weights)

    def differing_replicas(self) -> list[tuple[str, list[int]]]:
        return self._replica_check.differing()

    def stalled(self) -> list[str]:
        return self._engine.stalled()

    def close(self) -> None:
        self._engine.close()

    def _broadcast_state(self) -> None:
        """Gives every rank the variables of rank 0, the model's and the optimizer's."""
        state = self._locals[0].state()

        @tf.function(autograph=False)
        def broadcast_all() -> None:
            for path, variable in state.items():
                variable.assign(self._data.broadcast(variable.read_value(), 0, f"state/{path}"))

        broadcast_all()

    def _gradients(self, batch: Batch, step: tf.Tensor, clock: Clock) -> tuple[Any, BatchSums]:
        if self._reduction == "tape":
            return batch_gradients(
                self.model,
                self._variables,
                batch,
                step,
                1,
                wrap_tape=lambda tape: distributed_tape(tape, clock),
                loss_scale=self._locals[0].loss_scale.of_the_sum(),
            )
        gradients, sums = super()._gradients(batch, step, clock)
        reduced: Gradients = {}
        for index, paths in enumerate(self._buckets):
            flat = flatten(gradients, paths)
            flat = self._data.all_reduce(flat, f"gradients_{index}", clock=clock)
            reduced |= unflatten(flat, self._shapes, paths)
        return reduced, sums

    def _sum(self, vector: tf.Tensor, clock: Clock) -> tf.Tensor:
        return self._data.all_reduce(vector, "sums", clock=clock)

    def _gather(self, rows: tf.Tensor) -> tf.Tensor:
        return self._data.all_gather(rows, "rows")
