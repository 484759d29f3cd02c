"""Threads, GPUs and determinism: what TensorFlow fixes once a process."""

import os

import tensorflow as tf

from tfbig.config import ParallelConfig
from tfbig.errors import UserError


def prepare_devices(config: ParallelConfig, local_rank: int = 0, local_size: int = 1) -> None:
    """Pins one GPU to this process, shares the cores, and turns determinism on.

    Must come before TensorFlow touches a device; a second call in the same process keeps what the
    first one set.

    Args:
      config: `num_threads`, `deterministic`.
      local_rank: of this process on its host.
      local_size: processes on this host.

    Raises:
      UserError: this host has GPUs, but fewer than processes.
    """
    threads = config.num_threads or max(1, len(os.sched_getaffinity(0)) // local_size)
    try:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(max(2, threads))
        gpus = tf.config.list_physical_devices("GPU")
        if gpus:
            if len(gpus) < local_size:
                raise UserError(
                    f"this host runs {local_size} processes but has {len(gpus)} GPUs; each "
                    f"process needs its own: start at most {len(gpus)} on a host."
                )
            tf.config.set_visible_devices(gpus[local_rank], "GPU")
            tf.config.experimental.set_memory_growth(gpus[local_rank], True)
    except RuntimeError:  # the devices are initialised: an earlier trainer of this process did it
        pass
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
