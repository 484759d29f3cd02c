"""Threads, GPUs and determinism: what TensorFlow fixes once a process."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfbig.errors import UserError
from tfbig.parallel_config import ParallelConfig


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
    try:
        _set_threads(config.num_threads or max(1, len(os.sched_getaffinity(0)) // local_size))
        gpus = tf.config.list_physical_devices("GPU")
        if gpus:
            number = own_gpu(len(gpus), local_rank, local_size)
            tf.config.set_visible_devices(gpus[number], "GPU")
            tf.config.experimental.set_memory_growth(gpus[number], True)
    except RuntimeError:  # the devices are initialised: an earlier trainer of this process did it
        pass
    _set_arithmetic(config)


def driven_gpus() -> list[int]:
    """Returns the GPUs that this process drives, by their numbers among those that it sees."""
    return [int(gpu.name.rpartition(":")[2]) for gpu in tf.config.get_visible_devices("GPU")]


def own_gpu(
    num_gpus: int, local_rank: int, local_size: int, environ: Mapping[str, str] = os.environ
) -> int:
    """Returns which of the GPUs that a process sees is its own.

    A single one, among several processes, that CUDA_VISIBLE_DEVICES narrows them to is taken for
    the launcher's choice for this process (Slurm's --gpus-per-task); `check_own_gpus` finds out
    when it is not.

    Raises:
      UserError: they are fewer than the processes that share them.

    >>> own_gpu(8, 3, 8), own_gpu(1, 3, 8, {"CUDA_VISIBLE_DEVICES": "3"})
    (3, 0)
    """
    if num_gpus == 1 and "CUDA_VISIBLE_DEVICES" in environ:
        return 0
    if num_gpus < local_size:
        raise UserError(
            f"this host runs {local_size} processes but has {num_gpus} GPUs; each process needs "
            f"its own: start at most {num_gpus} on a host."
        )
    return local_rank


def own_share(gpus: Sequence[Any], local_rank: int, local_size: int) -> Sequence[Any]:
    """Returns the GPUs of one of several processes that see all of a host's.

    Raises:
      UserError: there are fewer GPUs than processes.
    """
    share = len(gpus) // local_size
    if gpus and not share:
        raise UserError(
            f"this host runs {local_size} processes but shows each only {len(gpus)} GPUs: start at "
            f"most {len(gpus)} on a host, or set CUDA_VISIBLE_DEVICES for each."
        )
    return gpus[local_rank * share : (local_rank + 1) * share]


def configure_local_devices(
    config: ParallelConfig, local_size: int = 1, local_rank: int = 0, shares_gpus: bool = False
) -> None:
    """Sets up the devices of a process that drives several, without touching one.

    These are GPUs, or on a machine without any, logical CPU devices, which share its threads.
    What the first call in a process has set stays.

    Args:
      config: `num_devices` (0: all GPUs, or one CPU device), `num_threads`, `deterministic`.
      local_size: processes on this host, which share its cores.
      local_rank: which of them this one is.
      shares_gpus: whether each of them sees all GPUs of the host and takes its share.

    Raises:
      UserError: fewer GPUs than processes that share them.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if shares_gpus:
        gpus = list(own_share(gpus, local_rank, local_size))
    try:
        _set_threads(config.num_threads or max(1, len(os.sched_getaffinity(0)) // local_size))
        gpus = gpus[: config.num_devices or len(gpus)]
        tf.config.set_visible_devices(gpus, "GPU")
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
        if not gpus:
            logical = [tf.config.LogicalDeviceConfiguration()] * max(1, config.num_devices)
            cpu = tf.config.list_physical_devices("CPU")[0]
            tf.config.set_logical_device_configuration(cpu, logical)
    except RuntimeError:  # the devices are initialised: an earlier trainer of this process did it
        pass
    _set_arithmetic(config)


def local_devices(config: ParallelConfig) -> list[str]:
    """Returns the names of the devices that one process drives.

    Raises:
      UserError: `num_devices` asks for more than there are.
    """
    names = [d.name for kind in ("GPU", "CPU") for d in tf.config.list_logical_devices(kind)]
    kind = "GPU" if "GPU" in names[0] else "CPU"
    names = [name for name in names if kind in name]
    wanted = config.num_devices or (len(names) if kind == "GPU" else 1)
    if len(names) < wanted:
        raise UserError(
            f"--num_devices={wanted}: this process has {len(names)} {kind} device"
            f"{'s' * (len(names) != 1)}: pass --num_devices={len(names)}."
        )
    return names[:wanted]


def _set_threads(threads: int) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(max(2, threads))


def _set_arithmetic(config: ParallelConfig) -> None:
    tf.config.experimental.enable_tensor_float_32_execution(config.tf32)
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
