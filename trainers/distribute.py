"""What the two tf.distribute strategies share: a replica of the model on each local device.

Variables are created in the strategy's scope, one component a device. A step runs in replica
context and works on its own component: the gradient is local, is summed once by the context's
all_reduce, and the update is made by each replica alone, on equal values. Keras' optimizers sum
gradients by themselves and are not used (docs/design.md, section 3).
"""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfbig.checkpoint_format import Slice
from tfbig.model.gpt import GPT
from trainers.base import Batch, StateReader
from trainers.clock import Clock
from trainers.gradients import BatchSums, Gradients, microbatch
from trainers.replica import Local, ReplicaTrainer
from trainers.replica_check import checksum, differing_copies

AXIS = "data"


class DistributeTrainer(ReplicaTrainer):
    """Trains one replica on each device of this process; subclasses make the strategy."""

    strategy: tf.distribute.Strategy
    holder = "replica"  # device after device, process after process

    @property
    def num_local(self) -> int:
        """Devices that this process drives."""
        return self.num_replicas // self.data_size

    # A replica in its own context.

    def _local_index(self) -> int:
        """Returns which of this process's devices the calling replica is on."""
        context = tf.distribute.get_replica_context()
        index = tf.get_static_value(context.replica_id_in_sync_group)
        assert index is not None, "tf.distribute makes the replica's number a constant"
        return int(index) - self.data_rank * self.num_local

    def _local(self) -> Local:
        if tf.distribute.in_cross_replica_context():
            return self._locals[0]
        return self._locals[self._local_index()]

    def _part(self, batch: Batch) -> Batch:
        """Returns the calling replica's rows of this process's batch."""
        return microbatch(batch, self._local_index(), self.num_local)

    def _gradients(
        self, batch: Batch, step: tf.Tensor, clock: Clock
    ) -> tuple[Gradients, BatchSums]:
        gradients, sums = super()._gradients(batch, step, clock)
        paths = list(gradients)
        reduced = self._all_reduce([gradients[path] for path in paths], clock)
        return dict(zip(paths, reduced, strict=True)), sums

    def _sum(self, vector: tf.Tensor, clock: Clock) -> tf.Tensor:
        return self._all_reduce([vector], clock)[0]

    def _all_reduce(self, tensors: list[tf.Tensor], clock: Clock) -> list[tf.Tensor]:
        context = tf.distribute.get_replica_context()
        return clock.around(AXIS, tensors, lambda: list(context.all_reduce("SUM", tensors)))

    # The contract.

    def _make_model(self, initial_values: bool = True) -> GPT:
        with self.strategy.scope():
            return super()._make_model(initial_values)

    def _make_locals(self, variables: dict[str, tf.Variable], training: bool) -> list[Local]:
        results = self.strategy.experimental_local_results
        components = {path: results(variable) for path, variable in variables.items()}
        replicas = []
        for index in range(self.num_local):
            own = {path: parts[index] for path, parts in components.items()}
            # Slots are plain variables of the replica's device, not the strategy's.
            with tf.device(next(iter(own.values())).device):
                replicas.append(self._make_local(own, training))
        weights = [list(local.weights().values()) for local in replicas]
        self._sums_of_copies = tf.function(
            lambda: tf.stack([_checksums(own) for own in weights]), autograph=False
        )
        return replicas

    def load_state(self, reader: StateReader, weights_only: bool = False) -> list[str]:
        missing = super().load_state(reader, weights_only)
        first, *others = (local.state() for local in self._locals)
        for other in others:
            for path, variable in other.items():
                variable.assign(first[path])
        return missing

    def differing_replicas(self) -> list[tuple[str, list[int]]]:
        names = list(self._locals[0].weights())
        return differing_copies(names, self._of_all_processes(self._sums_of_copies()))

    def _of_all_processes(self, rows: tf.Tensor) -> np.ndarray:
        """Returns the rows (n, ...) of all processes, in order."""
        return rows.numpy()

    def gradient_slices(self, batch: Batch, step: int) -> list[Slice]:
        @tf.function(autograph=False)
        def run(batch: Batch, step: tf.Tensor) -> Gradients:
            def one(batch: Batch, step: tf.Tensor) -> Gradients:
                return self._gradients(self._part(batch), step, Clock())[0]

            return self._first(self.strategy.run(one, args=(batch, step)))

        gradients = run(dict(batch), tf.constant(step, tf.int64))
        return [
            Slice(path, tuple(g.shape), (0,) * len(g.shape), g, self.rank == 0)
            for path, g in gradients.items()
        ]

    # Graphs.

    def _first(self, results):
        """Returns the first local replica's results."""
        return tf.nest.map_structure(
            lambda x: self.strategy.experimental_local_results(x)[0], results
        )

    def _train_graph(self, batch: Batch, *scalars: tf.Tensor):
        graph = super()._train_graph

        def one(batch: Batch, *scalars: tf.Tensor):
            return graph(self._part(batch), *scalars)

        return self._first(self.strategy.run(one, args=(batch, *scalars)))

    def _evaluate_graph(self, batch: Batch, weights: str) -> tf.Tensor:
        graph = super()._evaluate_graph

        def one(batch: Batch) -> tf.Tensor:
            return graph(self._part(batch), weights)

        return self._first(self.strategy.run(one, args=(batch,)))

    def _gather(self, rows: tf.Tensor) -> tf.Tensor:
        return tf.distribute.get_replica_context().all_gather(rows, axis=0)


def _checksums(variables: Sequence[tf.Variable]) -> tf.Tensor:
    """Returns the checksums (n,) of one replica's variables, made on its device."""
    with tf.device(variables[0].device):
        return tf.stack([checksum(variable) for variable in variables])
