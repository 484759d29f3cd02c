"""Horovod's calls for scripts that already exist: `import trainers.hvd as hvd`.

The names and meanings are horovod.tensorflow's; what runs is trainers/collectives.py, so a call
outside a tf.function is put into one, and names are fixed. After `smp.init()` these are calls
among the data ranks, the holders of the same stage, as they were with SageMaker's library.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfbig.errors import UserError
from trainers import hvd_facts, hvd_options
from trainers.hvd_gradients import DistributedGradientTape as _Tape
from trainers.hvd_gradients import distributed_optimizer, reduce_inside_graph
from trainers.hvd_options import NOT_SERVED, check_gradient_op, check_options, operation
from trainers.object_messages import broadcast_object_in, gather_objects
from trainers.script_session import is_keras, session, shared_name, unwrapped

Average, Sum = hvd_options.Average, hvd_options.Sum
Min, Max = hvd_options.Min, hvd_options.Max

ccl_built = hvd_facts.ccl_built
cuda_built = hvd_facts.cuda_built
ddl_built = hvd_facts.ddl_built
gloo_built = hvd_facts.gloo_built
gloo_enabled = hvd_facts.gloo_enabled
is_homogeneous = hvd_facts.is_homogeneous
local_rank_op = hvd_facts.local_rank_op
local_size_op = hvd_facts.local_size_op
mpi_built = hvd_facts.mpi_built
mpi_enabled = hvd_facts.mpi_enabled
mpi_threads_supported = hvd_facts.mpi_threads_supported
nccl_built = hvd_facts.nccl_built
process_set_included_op = hvd_facts.process_set_included_op
rank_op = hvd_facts.rank_op
rocm_built = hvd_facts.rocm_built
size_op = hvd_facts.size_op


class Compression:
    """What gradients are rounded to on their way."""

    none: tf.DType | None = None
    fp16: tf.DType | None = tf.float16


def init() -> None:
    """Starts Horovod; nothing after `smp.init()`, or when it runs already."""
    if not session().is_started:
        session().start()


def shutdown() -> None:
    """Shuts Horovod down."""
    session().close()


def is_initialized() -> bool:
    """Returns whether `init` has run."""
    return session().is_started


def rank() -> int:
    """Returns this process's number among the data ranks."""
    return session().line("data").rank


def size() -> int:
    """Returns the number of data ranks."""
    return session().line("data").size


def local_rank() -> int:
    """Returns this process's number on its host, by which it takes its GPU."""
    return session().engine.local_rank


def local_size() -> int:
    """Returns the processes on this host."""
    return session().engine.local_size


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: tf.DType | None = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    **options: Any,
) -> tf.Tensor:
    """Returns a tensor's mean, sum, min or max over the data ranks.

    Args:
      tensor: of the same shape on every rank; IndexedSlices become dense.
      average: Horovod's older way to say `op`.
      name: fixed; calls without one are counted.
      compression: what it is rounded to on its way.
      op: Average (default), Sum, Min or Max.
      prescale_factor: what the tensor is multiplied by before it is sent.
      postscale_factor: what the result is multiplied by.
      **options: of WITHOUT_EFFECT.

    Raises:
      UserError: an option that isn't served.
    """
    check_options("allreduce", options)
    op = operation("allreduce", average, op)
    group = session().line("data")

    def body(value: tf.Tensor, name: str) -> tf.Tensor:
        sent = _scaled(_compressed(value, compression), prescale_factor)
        sent = group.all_reduce(sent, name, "sum" if op == Average else op)
        sent = tf.cast(sent, value.dtype)
        return _scaled(_mean(sent, group.size) if op == Average else sent, postscale_factor)

    scales = f"{prescale_factor:g}_{postscale_factor:g}"
    return session().in_graph(body, tensor, f"allreduce_{op}_{compression}_{scales}", name or "")


def _compressed(tensor: tf.Tensor, compression: tf.DType | None) -> tf.Tensor:
    return tf.cast(tensor, compression) if compression and tensor.dtype.is_floating else tensor


def _mean(total: tf.Tensor, count: int) -> tf.Tensor:
    if count == 1:
        return total
    return total / count if total.dtype.is_floating else total // count


def _scaled(tensor: tf.Tensor, factor: float) -> tf.Tensor:
    if factor == 1.0:
        return tensor
    if tensor.dtype.is_floating:
        return tensor * tf.cast(factor, tensor.dtype)
    return tf.cast(tf.cast(tensor, tf.float64) * factor, tensor.dtype)


def reducescatter(
    tensor: Any,
    op: str = Average,
    name: str | None = None,
    compression: tf.DType | None = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    **options: Any,
) -> tf.Tensor:
    """Returns this data rank's rows of the mean or sum over the data ranks.

    Args:
      tensor: its first dim is divisible by the number of data ranks.
      op: Average or Sum.
      name: fixed; calls without one are counted.
      compression: what it is rounded to on its way.
      prescale_factor: what the tensor is multiplied by before it is sent.
      postscale_factor: what the result is multiplied by.
      **options: of WITHOUT_EFFECT.
    """
    check_options("reducescatter", options)
    check_gradient_op("reducescatter", op)
    group = session().line("data")
    rows = unwrapped(tensor).shape[0]
    if rows is None or rows % group.size:
        raise UserError(f"reducescatter: {rows} rows are no multiple of {group.size} data ranks.")

    def body(value: tf.Tensor, name: str) -> tf.Tensor:
        sent = _scaled(_compressed(value, compression), prescale_factor)
        own = tf.cast(group.reduce_scatter(sent, name), value.dtype)
        return _scaled(_mean(own, group.size) if op == Average else own, postscale_factor)

    kind = f"reducescatter_{op}_{compression}_{prescale_factor:g}_{postscale_factor:g}"
    return session().in_graph(body, tensor, kind, name or "")


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    compression: tf.DType | None = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    **options: Any,
) -> list[tf.Tensor]:
    """Returns several tensors' means or sums over the data ranks.

    Args:
      tensors: in the same order on every rank.
      average: Horovod's older way to say `op`.
      compression: what they are rounded to on their way.
      op: Average (default) or Sum.
      prescale_factor: what the tensors are multiplied by before they are sent.
      postscale_factor: what the results are multiplied by.
      name: no effect; calls are counted.
      **options: of WITHOUT_EFFECT.
    """
    check_options("grouped_allreduce", options)
    op = operation("grouped_allreduce", average, op)
    check_gradient_op("grouped_allreduce", op)
    sent = [_scaled(unwrapped(tensor), prescale_factor) for tensor in tensors]
    reduced = reduce_inside_graph(sent, op == Average, compression)
    return [_scaled(tensor, postscale_factor) for tensor in reduced if tensor is not None]


def allgather(tensor: Any, name: str | None = None, **options: Any) -> tf.Tensor:
    """Returns the data ranks' tensors joined along the first dim; it may differ in length.

    Args:
      tensor: this rank's.
      name: fixed; calls without one are counted.
      **options: of WITHOUT_EFFECT.
    """
    check_options("allgather", options)
    group = session().line("data")

    def body(value: tf.Tensor, name: str) -> tf.Tensor:
        rest = value.shape[1:].as_list()
        # Its length is hidden, or all ranks' would be taken to be the same.
        value = tf.compat.v1.placeholder_with_default(value, [None, *rest])
        return group.all_gather(value, name)

    return session().in_graph(body, tensor, "allgather", shared_name(name))


def broadcast(tensor: Any, root_rank: int, name: str | None = None, **options: Any) -> tf.Tensor:
    """Returns one data rank's tensor on all of them; options are those of WITHOUT_EFFECT."""
    check_options("broadcast", options)
    group = session().line("data")

    def body(value: tf.Tensor, name: str) -> tf.Tensor:
        return group.broadcast(value, root_rank, name)

    return session().in_graph(body, tensor, f"broadcast_{root_rank}", name or "")


def alltoall(tensor: Any, splits: Any = None, name: str | None = None, **options: Any) -> Any:
    """Sends rows of the first dim to each data rank.

    Args:
      tensor: rows for rank 0 first, then for rank 1, ...
      splits: rows for each rank, known when the call is traced; None shares them out equally.
      name: fixed.
      **options: of WITHOUT_EFFECT.

    Returns:
      The rows that came, and with `splits` how many came from each rank besides.

    Raises:
      UserError: there are no equal shares, or the splits aren't known.
    """
    check_options("alltoall", options)
    group = session().line("data")
    if splits is None:
        num_rows = unwrapped(tensor).shape[0]
        if num_rows is None or num_rows % group.size:
            raise UserError(
                f"alltoall: {num_rows} rows are no multiple of {group.size} data ranks: give"
                " splits."
            )
        counts = [num_rows // group.size] * group.size
    else:
        known = tf.get_static_value(splits) if tf.is_tensor(splits) else splits
        if known is None:
            raise UserError("alltoall: give splits as numbers, not as a tensor of the function.")
        counts = [int(count) for count in known]

    def body(value: tf.Tensor, name: str) -> Any:
        if splits is None:
            return group.exchange(value, counts, name)
        return group.exchange_counted(value, counts, name)

    own = (splits is None, *counts)
    return session().in_graph(body, tensor, "alltoall", shared_name(name), own)


def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, **options: Any
) -> list[tf.Tensor]:
    """Gives every data rank one rank's values of variables, and returns these.

    Args:
      variables: as for broadcast_variables.
      root_rank: whose values.
      name: no effect; calls are counted.
      **options: of WITHOUT_EFFECT.
    """
    broadcast_variables(variables, root_rank, **options)
    return [unwrapped(variable) for variable in variables]


def broadcast_variables(variables: Sequence[Any], root_rank: int = 0, **options: Any) -> None:
    """Gives every data rank one rank's values of variables.

    Args:
      variables: tf.Variables or Keras Variables, the same list on every rank.
      root_rank: whose values.
      **options: of WITHOUT_EFFECT.
    """
    check_options("broadcast_variables", options)
    for variable in variables:
        value = broadcast(variable, root_rank, None)
        target = variable.value if is_keras(variable) else variable
        target.assign(value)


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None, **options: Any) -> Any:
    """Returns one data rank's object: numbers, texts, arrays, lists, tuples and dicts of them.

    Args:
      obj: the root's; others' don't matter.
      root_rank: whose.
      name: no effect.
      **options: of WITHOUT_EFFECT.
    """
    check_options("broadcast_object", options)
    return broadcast_object_in(session().line("data"), obj, root_rank)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, **options: Any
) -> Callable[[Any], Any]:
    """Returns broadcast_object of one root; arguments are as there, `session` has no effect."""
    check_options("broadcast_object_fn", options)
    return functools.partial(broadcast_object, root_rank=root_rank, name=name)


def allgather_object(obj: Any, name: str | None = None, **options: Any) -> list[Any]:
    """Returns the data ranks' objects, in order of rank; options are those of WITHOUT_EFFECT."""
    check_options("allgather_object", options)
    return gather_objects(session().line("data"), obj)


def barrier() -> None:
    """Waits for all data ranks."""
    allreduce(tf.zeros([1]), name="barrier")


def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: tf.DType | None = Compression.none,
    sparse_as_dense: bool = True,
    op: str = Average,
    **options: Any,
) -> tf.GradientTape:
    """Returns a tape whose gradients are averaged, or summed, over the data ranks.

    Gradients of tables become dense whatever `sparse_as_dense` says; devices are chosen by the
    engine, and the options of WITHOUT_EFFECT have none.

    Raises:
      UserError: another option.
    """
    check_options("DistributedGradientTape", options)
    check_gradient_op("DistributedGradientTape", op)
    return _Tape(gradtape, op == Average, compression)


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    compression: tf.DType | None = Compression.none,
    op: str = Average,
    backward_passes_per_step: int = 1,
    **options: Any,
) -> keras.optimizers.Optimizer:
    """Returns the optimizer, which averages or sums gradients over the data ranks first.

    Raises:
      UserError: backward_passes_per_step other than 1, or an option that isn't served.
    """
    check_options("DistributedOptimizer", options)
    check_gradient_op("DistributedOptimizer", op)
    if backward_passes_per_step != 1:
        raise UserError(
            f"backward_passes_per_step={backward_passes_per_step} isn't served: add gradients up in"
            " the script, or train by `tfbig train --microbatches`."
        )
    return distributed_optimizer(optimizer, op == Average, compression)


def __getattr__(name: str) -> Any:
    if name in NOT_SERVED:
        raise AttributeError(f"hvd.{name} isn't served; instead: {NOT_SERVED[name]}.")
    raise AttributeError(f"module trainers.hvd has no attribute {name}")
