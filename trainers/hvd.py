"""Horovod's calls for scripts that already exist: `import trainers.hvd as hvd`.

The names and meanings are horovod.tensorflow's; what runs is trainers/collectives.py, so a call
outside a tf.function is put into one, and names are fixed. After `smp.init()` these are calls
among the data ranks, the holders of the same stage, as they were with SageMaker's library.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfbig.errors import UserError
from trainers.hvd_gradients import DistributedGradientTape as _Tape
from trainers.hvd_gradients import distributed_optimizer, reduce_inside_graph
from trainers.object_messages import broadcast_object_in, gather_objects
from trainers.script_session import is_keras, session, unwrapped

Average, Sum, Min, Max = "average", "sum", "min", "max"

# Options of Horovod's calls that change nothing here: devices, groups of tensors and the name scope
# are the engine's business, and a table's gradient becomes dense anyway.
WITHOUT_EFFECT = (
    "device_dense device_sparse sparse_as_dense num_groups groups gradient_predivide_factor"
    " ignore_name_scope use_locking session inplace"
).split()
# Names of Horovod's that are not here, and what serves instead.
NOT_SERVED = {
    "Adasum": "hvd.Average and hvd.Sum are",
    "Product": "hvd.Sum, hvd.Min and hvd.Max are",
    "ProcessSet": "groups of ranks are those of trainers.smp, or a mesh of `tfbig train`",
    "add_process_set": "groups of ranks are those of trainers.smp, or a mesh of `tfbig train`",
    "remove_process_set": "groups of ranks are those of trainers.smp, or a mesh of `tfbig train`",
    "global_process_set": "leave process_set out: calls are among all data ranks",
    "broadcast_global_variables": "TensorFlow 2 collects no variables: hvd.broadcast_variables",
    "BroadcastGlobalVariablesHook": "TensorFlow 2 has no sessions: hvd.broadcast_variables",
    "PartialDistributedGradientTape": "reduce what is shared by hvd.grouped_allreduce",
    "SyncBatchNormalization": "keras.layers.BatchNormalization of each rank's rows",
    "elastic": "a run that stops resumes from its checkpoint on any number of ranks",
    "grouped_allgather": "hvd.allgather",
    "grouped_reducescatter": "hvd.reducescatter",
    "join": "give every rank as many batches, by take() or drop_remainder=True",
    "cross_rank": "hosts have no numbers: hvd.rank() // hvd.local_size()",
    "cross_size": "hvd.size() // hvd.local_size()",
    "start_timeline": "set HOROVOD_TIMELINE at the launch",
    "stop_timeline": "set HOROVOD_TIMELINE at the launch",
}


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
    _check_options("allreduce", options)
    if average is not None and op is not None:
        raise UserError("allreduce takes average= or op=, not both.")
    op = op or (Sum if average is False else Average)
    group = session().line("data")

    def body(value: tf.Tensor, name: str) -> tf.Tensor:
        sent = tf.cast(value, compression) if compression and value.dtype.is_floating else value
        sent = group.all_reduce(
            _scaled(sent, prescale_factor), name, "sum" if op == Average else op
        )
        sent = tf.cast(sent, value.dtype)
        return _scaled(_mean(sent, group.size) if op == Average else sent, postscale_factor)

    scales = f"{prescale_factor:g}_{postscale_factor:g}"
    return session().in_graph(body, tensor, f"allreduce_{op}_{compression}_{scales}", name or "")


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


def reducescatter(tensor: Any, op: str = Average, name: str | None = None) -> tf.Tensor:
    """Returns this data rank's rows of the mean or sum over the data ranks.

    Args:
      tensor: its first dim is divisible by the number of data ranks.
      op: Average or Sum.
      name: fixed; calls without one are counted.
    """
    _check_gradient_op("reducescatter", op)
    group = session().line("data")
    rows = unwrapped(tensor).shape[0]
    if rows is None or rows % group.size:
        raise UserError(f"reducescatter: {rows} rows are no multiple of {group.size} data ranks.")

    def body(value: tf.Tensor, name: str) -> tf.Tensor:
        own = group.reduce_scatter(value, name)
        return _mean(own, group.size) if op == Average else own

    return session().in_graph(body, tensor, f"reducescatter_{op}", name or "")


def grouped_allreduce(tensors: Sequence[Any], op: str = Average) -> list[tf.Tensor]:
    """Returns several tensors' means or sums over the data ranks."""
    if op not in (Average, Sum):
        raise UserError(f"grouped_allreduce takes hvd.Average and hvd.Sum, not {op}.")
    return [t for t in reduce_inside_graph(tensors, op == Average, None) if t is not None]


def allgather(tensor: Any, name: str | None = None) -> tf.Tensor:
    """Returns the data ranks' tensors joined along the first dim; it may differ in length."""
    group = session().line("data")

    def body(value: tf.Tensor, name: str) -> tf.Tensor:
        rest = value.shape[1:].as_list()
        # Its length is hidden, or all ranks' would be taken to be the same.
        value = tf.compat.v1.placeholder_with_default(value, [None, *rest])
        return group.all_gather(value, name)

    return session().in_graph(body, tensor, "allgather", name or "")


def broadcast(tensor: Any, root_rank: int, name: str | None = None) -> tf.Tensor:
    """Returns one data rank's tensor on all of them."""
    group = session().line("data")

    def body(value: tf.Tensor, name: str) -> tf.Tensor:
        return group.broadcast(value, root_rank, name)

    return session().in_graph(body, tensor, f"broadcast_{root_rank}", name or "")


def alltoall(tensor: Any, splits: Sequence[int], name: str | None = None) -> tf.Tensor:
    """Sends rows of the first dim to each data rank; returns those that came.

    Args:
      tensor: rows for rank 0 first, then for rank 1, ...
      splits: rows for each rank, plain numbers.
      name: fixed.
    """
    group = session().line("data")

    def body(value: tf.Tensor, name: str) -> tf.Tensor:
        return group.exchange(value, list(splits), name)

    return session().in_graph(body, tensor, f"alltoall_{tuple(splits)}", name or "")


def broadcast_variables(variables: Sequence[Any], root_rank: int = 0) -> None:
    """Gives every data rank one rank's values of variables.

    Args:
      variables: tf.Variables or Keras Variables, the same list on every rank.
      root_rank: whose values.
    """
    for variable in variables:
        value = broadcast(variable, root_rank, None)
        target = variable.value if is_keras(variable) else variable
        target.assign(value)


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Returns one data rank's object: numbers, texts, arrays, lists, tuples and dicts of them."""
    return broadcast_object_in(session().line("data"), obj, root_rank)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Returns the data ranks' objects, in order of rank."""
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
    _check_options("DistributedGradientTape", options)
    _check_gradient_op("DistributedGradientTape", op)
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
    _check_options("DistributedOptimizer", options)
    _check_gradient_op("DistributedOptimizer", op)
    if backward_passes_per_step != 1:
        raise UserError(
            f"backward_passes_per_step={backward_passes_per_step} isn't served: add gradients up in"
            " the script, or train by `tfbig train --microbatches`."
        )
    return distributed_optimizer(optimizer, op == Average, compression)


def _check_options(caller: str, options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if name not in WITHOUT_EFFECT and value is not None:
            raise UserError(f"hvd.{caller}({name}={value!r}) isn't served: leave it out.")


def _check_gradient_op(caller: str, op: str) -> None:
    if op not in (Average, Sum):
        raise UserError(f"{caller} takes op=hvd.Average or op=hvd.Sum, not {op}.")


def to_tensor(value: Any) -> tf.Tensor:
    """Returns a tensor of a tensor or a variable of either kind."""
    return unwrapped(value)


def __getattr__(name: str) -> Any:
    if name in NOT_SERVED:
        raise AttributeError(f"hvd.{name} isn't served; instead: {NOT_SERVED[name]}.")
    raise AttributeError(f"module trainers.hvd has no attribute {name}")
