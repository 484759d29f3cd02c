"""Data parallelism between processes: tf.distribute.MultiWorkerMirroredStrategy."""

import functools
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfbig.config import Config
from tfbig.errors import UserError
from tfbig.parallel_config import ParallelConfig
from trainers.cluster import in_slurm_step, place_from_tf_config
from trainers.devices import configure_local_devices
from trainers.distribute import DistributeTrainer
from trainers.validate import check_data_parallel_only, check_no_sharding

AGREE_SECONDS = 1800.0  # rank 0 may prepare data for the others
OPERATIONS: dict[str, Callable[[np.ndarray], int]] = {"min": np.min, "max": np.max, "sum": np.sum}


@functools.cache
def make_strategy(on_gpus: bool) -> tf.distribute.MultiWorkerMirroredStrategy:
    """Returns the one strategy of this process: TensorFlow starts its cluster once."""
    resolvers = tf.distribute.cluster_resolver
    resolver = None  # by TF_CONFIG; without that a world of one
    if place_from_tf_config() is None and in_slurm_step():
        resolver = resolvers.SlurmClusterResolver()
    kinds = tf.distribute.experimental.CommunicationImplementation
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=kinds.NCCL if on_gpus else kinds.RING
    )
    return tf.distribute.MultiWorkerMirroredStrategy(resolver, communication_options=options)


class MultiWorkerTrainer(DistributeTrainer):
    """Trains on all devices of each process that TF_CONFIG or Slurm names."""

    def __init__(self, config: Config) -> None:
        check_data_parallel_only(config)
        check_no_sharding(config)
        self.config = config
        on_gpus = bool(tf.config.list_physical_devices("GPU"))
        check_devices(config.parallel, on_gpus)
        place = place_from_tf_config()
        configure_local_devices(config.parallel, place.local_size if place else 1)
        self.strategy = make_strategy(on_gpus)
        self.num_replicas = self.strategy.num_replicas_in_sync
        local = len(self.strategy.extended.worker_devices)
        self.size = self.data_size = self.num_replicas // local
        resolver = self.strategy.cluster_resolver
        if place is not None:
            self.rank = place.rank
        elif resolver is not None and self.size > 1:
            self.rank = int(resolver.task_id)
        self.data_rank = self.rank
        self._functions: dict[float, Callable] = {}

    def agree(self, value: int, op: str) -> int:
        everyone = self._all(tf.constant([value], tf.int64), AGREE_SECONDS)
        return int(OPERATIONS[op](everyone))

    def broadcast(self, array: np.ndarray) -> np.ndarray:
        return self._all(tf.convert_to_tensor(array), AGREE_SECONDS)[: len(array)]

    def barrier(self, timeout: float) -> None:
        try:
            self._all(tf.constant([0], tf.int64), timeout)
        except tf.errors.DeadlineExceededError:
            raise TimeoutError(
                f"rank {self.rank} waited {timeout:g} s for the other ranks"
            ) from None

    def close(self) -> None:
        # A process that leaves early takes the others' collectives with it.
        if self.size > 1:
            self.barrier(AGREE_SECONDS)

    def _all(self, tensor: tf.Tensor, timeout: float) -> np.ndarray:
        """Returns the tensors (n, ...) of all processes, joined along the first dim."""
        if self.size == 1:
            return tensor.numpy()
        if timeout not in self._functions:
            options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=timeout)

            def one(x: tf.Tensor) -> tf.Tensor:
                context = tf.distribute.get_replica_context()
                return context.all_gather(tf.identity(x), axis=0, options=options)

            self._functions[timeout] = tf.function(
                lambda x: self._first(self.strategy.run(one, args=(x,))), autograph=False
            )
        everyone = self._functions[timeout](tensor).numpy()  # each process's, once a device
        by_device = everyone.reshape([self.size, self.num_local, *tensor.shape])
        return by_device[:, 0].reshape([-1, *tensor.shape[1:]])


def check_devices(parallel: ParallelConfig, on_gpus: bool) -> None:
    """Checks that the number of devices is one that tf.distribute takes.

    Raises:
      UserError: several logical CPU devices.
    """
    if parallel.num_devices > 1 and not on_gpus:
        raise UserError(
            f"--num_devices={parallel.num_devices}: without GPUs tf.distribute gives each process"
            " of --strategy=multi_worker one device: start more processes."
        )
