"""What scripts ask Horovod about itself: how it was built, what it runs by, ranks as tensors."""

import tensorflow as tf

from tfbig.errors import UserError
from trainers.collectives import fact
from trainers.script_session import session


def mpi_built() -> bool:
    """Returns whether Horovod was built with MPI."""
    return bool(fact("mpi_built"))


def gloo_built() -> bool:
    """Returns whether Horovod was built with Gloo."""
    return bool(fact("gloo_built"))


def nccl_built() -> int:
    """Returns the version of NCCL that Horovod was built with, 0 without."""
    return int(fact("nccl_built"))


def cuda_built() -> bool:
    """Returns whether Horovod was built with CUDA."""
    return bool(fact("cuda_built"))


def rocm_built() -> bool:
    """Returns whether Horovod was built with ROCm."""
    return bool(fact("rocm_built"))


def ddl_built() -> bool:
    """Returns whether Horovod was built with IBM's DDL."""
    return bool(fact("ddl_built"))


def ccl_built() -> bool:
    """Returns whether Horovod was built with oneCCL."""
    return bool(fact("ccl_built"))


def mpi_enabled() -> bool:
    """Returns whether ranks reach each other by MPI."""
    return bool(fact("mpi_enabled"))


def gloo_enabled() -> bool:
    """Returns whether ranks reach each other by Gloo."""
    return bool(fact("gloo_enabled"))


def mpi_threads_supported() -> bool:
    """Returns whether a script may use MPI beside Horovod, from several threads."""
    return mpi_enabled() and bool(fact("mpi_threads_supported"))


def is_homogeneous() -> bool:
    """Returns whether every host has as many ranks."""
    session().engine  # noqa: B018 - says that init() is missing
    return bool(fact("is_homogeneous"))


def rank_op(name: str | None = None) -> tf.Tensor:
    """Returns rank() as a tensor."""
    return _number(session().line("data").rank, name or "rank")


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Returns size() as a tensor."""
    _check_all(process_set_id)
    return _number(session().line("data").size, name or "size")


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Returns local_rank() as a tensor."""
    return _number(session().engine.local_rank, name or "local_rank")


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Returns local_size() as a tensor."""
    return _number(session().engine.local_size, name or "local_size")


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Returns 1: this rank is one of all, the only set there is."""
    _check_all(process_set_id)
    return _number(1, name or "process_set_included")


def _number(value: int, name: str) -> tf.Tensor:
    return tf.constant(value, tf.int32, name=name)


def _check_all(process_set_id: int) -> None:
    if process_set_id != 0:
        raise UserError(
            f"process_set_id={process_set_id} isn't served: leave it out; calls are among all data"
            " ranks."
        )
