"""One process, one device: the reference that every other strategy must equal."""

import numpy as np

from tfbig.config import Config
from tfbig.model.gpt import GPT
from trainers.devices import prepare_devices
from trainers.replica import ReplicaTrainer
from trainers.validate import check_data_parallel_only, check_no_sharding, check_one_device


class SingleTrainer(ReplicaTrainer):
    """Trains on one device."""

    def __init__(self, config: Config) -> None:
        check_data_parallel_only(config)
        check_no_sharding(config)
        check_one_device(config)
        self.config = config
        prepare_devices(config.parallel)

    @property
    def whole_model(self) -> GPT:
        return self.model

    def agree(self, value: int, op: str) -> int:
        return value

    def gather(self, values: np.ndarray) -> np.ndarray:
        return values

    def broadcast(self, array: np.ndarray) -> np.ndarray:
        return array

    def barrier(self, timeout: float) -> None:
        return None
