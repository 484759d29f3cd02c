"""Data parallelism in one process: tf.distribute.MirroredStrategy over this host's devices."""

import numpy as np
import tensorflow as tf

from tfbig.config import Config
from trainers.devices import configure_local_devices, local_devices
from trainers.distribute import DistributeTrainer
from trainers.validate import check_data_parallel_only, check_no_sharding


class MirroredTrainer(DistributeTrainer):
    """Trains a replica on each of this host's GPUs, or on logical CPU devices."""

    def __init__(self, config: Config) -> None:
        check_data_parallel_only(config)
        check_no_sharding(config)
        self.config = config
        configure_local_devices(config.parallel)
        devices = local_devices(config.parallel)
        self.num_replicas = len(devices)
        # TF's default on CPUs numbers its collectives anew in each strategy: the second one of a
        # process would fail where it has another number of devices.
        on_gpus = any("GPU" in device for device in devices)
        operations = tf.distribute.NcclAllReduce() if on_gpus else None
        self.strategy = tf.distribute.MirroredStrategy(
            devices, cross_device_ops=operations or tf.distribute.ReductionToOneDevice()
        )

    def agree(self, value: int, op: str) -> int:
        return value

    def gather(self, values: np.ndarray) -> np.ndarray:
        return values

    def broadcast(self, array: np.ndarray) -> np.ndarray:
        return array

    def barrier(self, timeout: float) -> None:
        return None
