"""Data parallelism between processes: tf.distribute.MultiWorkerMirroredStrategy."""

import functools
import os
import sys
from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

from tfbig.config import Config
from tfbig.errors import UserError
from tfbig.parallel_config import ParallelConfig
from trainers.agreement import check_equal_ranks
from trainers.cluster import Place, place_from_tf_config
from trainers.devices import configure_local_devices
from trainers.distribute import DistributeTrainer
from trainers.slurm import has_own_gpus, place_from_slurm
from trainers.validate import check_data_parallel_only, check_no_sharding
from trainers.world_size import check_world_size

ALONE = (
    "tfbig: --strategy=multi_worker without TF_CONFIG and outside a step of Slurm's: this process "
    "trains alone"
)
ADVICE = (
    "--strategy=multi_worker finds the other ranks by TF_CONFIG or a step of Slurm's: start them "
    "by `tfbig launch` (docs/clusters.md), or set TF_CONFIG for each"
)
AGREE_SECONDS = 1800.0  # rank 0 may prepare data for the others
OPERATIONS: dict[str, Callable[[np.ndarray], int]] = {"min": np.min, "max": np.max, "sum": np.sum}


@functools.cache
def make_strategy(num_gpus: int, slurm: Place | None) -> tf.distribute.MultiWorkerMirroredStrategy:
    """Returns the one strategy of this process: TensorFlow starts its cluster once.

    Args:
      num_gpus: of this process.
      slurm: the cluster as Slurm describes it; None takes TF_CONFIG, or a world of one.
    """
    resolver = None
    if slurm is not None:
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({"worker": list(slurm.addresses)}),
            task_type="worker",
            task_id=slurm.rank,
            num_accelerators={"GPU": num_gpus},
            rpc_layer="grpc",
        )
    kinds = tf.distribute.experimental.CommunicationImplementation
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=kinds.NCCL if num_gpus else kinds.RING
    )
    return tf.distribute.MultiWorkerMirroredStrategy(resolver, communication_options=options)


def sees_all_gpus(in_slurm: bool, environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether each process of a host sees all of its GPUs, so that they must share them."""
    return not has_own_gpus(environment) if in_slurm else "CUDA_VISIBLE_DEVICES" not in environment


class MultiWorkerTrainer(DistributeTrainer):
    """Trains on all devices of each process that TF_CONFIG or Slurm names."""

    # Stopping TensorFlow 2.21's profiler in a process of its cluster ends it in about one run of
    # three, with "invalid pointer" from the allocator.
    can_be_captured = False

    def __init__(self, config: Config) -> None:
        check_data_parallel_only(config)
        check_no_sharding(config)
        self.config = config
        check_devices(config.parallel, bool(tf.config.list_physical_devices("GPU")))
        place = place_from_tf_config()
        slurm = place_from_slurm() if place is None else None
        place = place or slurm
        check_world_size(len(place.addresses) if place else 1, ADVICE)  # else all wait for ever
        if place is None:
            print(ALONE, file=sys.stderr, flush=True)
            place = Place(("localhost:0",), 0)
        self.local_rank, self.local_size = place.local_rank, place.local_size
        shares_gpus = place.local_size > 1 and sees_all_gpus(slurm is not None)
        configure_local_devices(config.parallel, place.local_size, place.local_rank, shares_gpus)
        self.strategy = make_strategy(len(tf.config.get_visible_devices("GPU")), slurm)
        self.num_replicas = self.strategy.num_replicas_in_sync
        local = len(self.strategy.extended.worker_devices)
        self.size = self.data_size = self.num_replicas // local
        self.rank = place.rank
        self.data_rank = self.rank
        self._functions: dict[float, Callable] = {}
        check_equal_ranks(self._differs, config)

    def agree(self, value: int, op: str) -> int:
        everyone = self._all(tf.constant([value], tf.int64), AGREE_SECONDS)
        return int(OPERATIONS[op](everyone))

    def gather(self, values: np.ndarray) -> np.ndarray:
        return self._all(tf.constant(values, tf.int64), AGREE_SECONDS)

    def broadcast(self, array: np.ndarray) -> np.ndarray:
        return self._all(tf.convert_to_tensor(array), AGREE_SECONDS)[: len(array)]

    def _differs(self, values: np.ndarray) -> np.ndarray:
        if self.agree(len(values), "min") != self.agree(len(values), "max"):
            return np.ones(len(values), bool)
        everyone = self.gather(values).reshape([self.size, len(values)])  # (ranks, n)
        return (everyone != everyone[0]).any(axis=0)

    def barrier(self, timeout: float) -> None:
        try:
            self._all(tf.constant([0], tf.int64), timeout)
        except tf.errors.DeadlineExceededError:
            raise TimeoutError(
                f"rank {self.rank} waited {timeout:g} s for the other ranks"
            ) from None

    def close(self) -> None:
        # A process that leaves early takes the others' collectives with it. One that leaves by an
        # exception of its own must not meet their next collective.
        error = sys.exc_info()[1]
        if self.size > 1 and (error is None or getattr(error, "on_all_ranks", False)):
            self.barrier(AGREE_SECONDS)

    def _of_all_processes(self, rows: tf.Tensor) -> np.ndarray:
        return self._all(rows, AGREE_SECONDS)

    def _all(self, tensor: tf.Tensor, timeout: float) -> np.ndarray:
        """Returns the tensors (n, ...) of all processes, joined along the first dim."""
        if self.size == 1:
            return tensor.numpy()
        if timeout not in self._functions:
            kinds = tf.distribute.experimental.CommunicationImplementation
            # By RPC, never NCCL, which would hang where two processes drive one GPU.
            options = tf.distribute.experimental.CommunicationOptions(
                timeout_seconds=timeout, implementation=kinds.RING
            )

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
