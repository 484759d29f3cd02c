"""Seconds that offloading costs: transfers to host memory and back, and the update there. TF-free.

On a device whose memory is the host's nothing moves, and the update takes what it takes anyway.
"""

from tfbig.config import Config
from tfbig.planner.cluster import Cluster
from tfbig.planner.memory import MemoryOptions
from trainers.activations import group_size, input_bytes
from trainers.state_bytes import StateBytes

# Bytes an element that tfbig/flat_optimizer.py reads and writes, operation by operation in float32:
# the gradient's scaling 8, weight decay 28, two slots of 32 each and a square of 8, the quotient 40
# and its subtraction 12; the moving average 32.
_ADAMW, _SGD, _AVERAGE = 160.0, 48.0, 32.0
_FLOAT32 = 4.0


class Offload:
    """What offloading adds to a step of one rank.

    Args:
      config: of the run.
      cluster: that runs it.
      options: of memory.
      state: bytes a parameter.
      rows: sequences of a microbatch.
      data_size: ranks that share state.
    """

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        options: MemoryOptions,
        state: StateBytes,
        rows: int,
        data_size: int,
    ) -> None:
        self._config, self._cluster, self._options = config, cluster, options
        self._state, self._rows = state, rows
        self._data = data_size if options.sharding_level else 1
        self._bandwidth = cluster.device.host_bandwidth

    def waiting(self, blocks: int, ahead: float, back: float) -> tuple[float, float]:
        """Returns what passes do not hide of a microbatch's activations on their way.

        Args:
          blocks: of a stage.
          ahead: seconds of its forward pass, beside which they leave.
          back: seconds of its backward pass, beside which they come back.
        """
        group = group_size(self._options.activation_checkpointing)
        if not (self._options.offload_activations and group and self._bandwidth):
            return 0.0, 0.0
        seconds = blocks / group * input_bytes(self._config, self._rows) / self._bandwidth
        return max(0.0, seconds - ahead), max(0.0, seconds - back)

    def of_state(self, trained: int) -> float:
        """Returns the seconds in which a rank's gradients go to the host and weights come back.

        At ZeRO level 3 weights stay on the host, from which each gathering takes its part.

        Args:
          trained: parameters of the rank.
        """
        if not (self._options.offload_optimizer_state and self._bandwidth):
            return 0.0
        part = _FLOAT32 * trained / self._data
        times = 1.0 + (2 * self._config.parallel.microbatches if self._is_full else 1)
        return times * part / self._bandwidth

    @property
    def _is_full(self) -> bool:
        return self._options.sharding_level == 3

    def update(self, trained: int) -> float | None:
        """Returns the seconds of an update on the host; None where the device makes it."""
        if not (self._options.offload_optimizer_state and self._bandwidth):
            return None
        optimizer, cluster = self._config.optimizer, self._cluster
        moved = _ADAMW if optimizer.optimizer == "adamw" else _SGD
        moved += _AVERAGE if optimizer.ema_decay > 0 else 0.0
        ranks = min(cluster.devices_per_node, cluster.num_devices)  # share a host
        return moved * trained / self._data * ranks / cluster.device.host_memory_bandwidth
