"""SageMaker's data-parallel calls for scripts that already exist: `import trainers.sdp as sdp`.

The names and meanings are those of its documentation for TensorFlow; what runs is Horovod's
all-reduce, by trainers/hvd.py. What had to do with its servers of gradient shards has no effect.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfbig.errors import UserError
from trainers import hvd
from trainers.hvd import Compression, local_rank, local_size, rank, shutdown, size
from trainers.script_session import session

__all__ = [
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "ReduceOp",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "init",
    "local_rank",
    "local_size",
    "oob_allreduce",
    "overlap",
    "rank",
    "shutdown",
    "size",
]


class ReduceOp:
    """How tensors are combined."""

    AVERAGE, SUM, MIN, MAX = hvd.Average, hvd.Sum, hvd.Min, hvd.Max


def init() -> None:
    """Starts the engine.

    Raises:
      UserError: it runs already; SageMaker's library refused a second call too.
    """
    if session().is_started:
        raise UserError("sdp.init() was called before: call it once.")
    hvd.init()


def allreduce(
    tensor: Any,
    param_index: int,
    num_params: int,
    compression: tf.DType | None = Compression.none,
    op: str = ReduceOp.AVERAGE,
) -> tf.Tensor:
    """Returns a gradient's mean over all ranks; any other tensor is as safe.

    Args:
      tensor: the gradient.
      param_index: of its variable among `num_params`, which has no effect.
      num_params: no effect.
      compression: what it is rounded to on its way.
      op: of ReduceOp.
    """
    return hvd.allreduce(tensor, compression=compression, op=op)


def oob_allreduce(
    tensor: Any, compression: tf.DType | None = Compression.none, op: str = ReduceOp.AVERAGE
) -> tf.Tensor:
    """Returns a tensor's mean over all ranks: of losses and metrics.

    Raises:
      UserError: another op.
    """
    if op != ReduceOp.AVERAGE:
        raise UserError(f"oob_allreduce averages; op={op} is for allreduce.")
    return hvd.allreduce(tensor, compression=compression, op=op)


def broadcast(tensor: Any, root_rank: int) -> tf.Tensor:
    """Returns one rank's tensor on all ranks."""
    return hvd.broadcast(tensor, root_rank)


def broadcast_variables(variables: Sequence[Any], root_rank: int) -> None:
    """Gives every rank one rank's values of variables."""
    hvd.broadcast_variables(variables, root_rank)


def broadcast_global_variables(root_rank: int) -> None:
    """Refused: TensorFlow 2 keeps no collection of global variables."""
    raise UserError(
        "broadcast_global_variables needs TensorFlow 1's global variables, which TensorFlow 2"
        " doesn't collect: pass them to broadcast_variables."
    )


def overlap(tensor: Any) -> Any:
    """Returns its argument: there is nothing to arrange here for communication to overlap."""
    return tf.identity(tensor)


def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: tf.DType | None = Compression.none,
    sparse_as_dense: bool = False,
    op: str = ReduceOp.AVERAGE,
) -> tf.GradientTape:
    """Returns a tape whose gradients are averaged over all ranks.

    Raises:
      UserError: a device, which SageMaker's library refused too, or another op.
    """
    _check_devices(device_dense, device_sparse)
    if op != ReduceOp.AVERAGE:
        raise UserError(f"sdp.DistributedGradientTape averages; op={op} isn't served.")
    return hvd.DistributedGradientTape(gradtape, compression=compression)


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: tf.DType | None = Compression.none,
    sparse_as_dense: bool = False,
    op: str = ReduceOp.AVERAGE,
    bucket_cap_mb: int = 25,
) -> keras.optimizers.Optimizer:
    """Returns the optimizer, which averages gradients over all ranks first.

    `use_locking` and `bucket_cap_mb` have no effect.

    Raises:
      UserError: a device.
    """
    _check_devices(device_dense, device_sparse)
    return hvd.DistributedOptimizer(optimizer, compression=compression, op=op)


class BroadcastGlobalVariablesHook:
    """Refused: sessions and estimators left TensorFlow."""

    def __init__(self, root_rank: int) -> None:
        raise UserError(
            "BroadcastGlobalVariablesHook needs TensorFlow 1's sessions: call"
            " sdp.broadcast_variables after the first step."
        )


def _check_devices(*devices: str) -> None:
    if any(devices):
        raise UserError("device_dense and device_sparse aren't served: leave them out.")
