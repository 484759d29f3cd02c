"""Options of Horovod's calls: how tensors are combined, what has no effect, what isn't served."""

from collections.abc import Mapping
from typing import Any

from tfbig.errors import UserError

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


def check_options(caller: str, options: Mapping[str, Any]) -> None:
    """Checks that a call's further options are of WITHOUT_EFFECT.

    Raises:
      UserError: one isn't.
    """
    for name, value in options.items():
        if name not in WITHOUT_EFFECT and value is not None:
            raise UserError(f"hvd.{caller}({name}={value!r}) isn't served: leave it out.")


def operation(caller: str, average: bool | None, op: str | None) -> str:
    """Returns how tensors are combined; `average` is Horovod's older way to say `op`.

    Raises:
      UserError: both are given.
    """
    if average is not None and op is not None:
        raise UserError(f"{caller} takes average= or op=, not both.")
    return op or (Sum if average is False else Average)


def check_gradient_op(caller: str, op: str) -> None:
    """Checks that a call which knows means and sums alone gets one of them.

    Raises:
      UserError: another one.
    """
    if op not in (Average, Sum):
        raise UserError(f"{caller} takes op=hvd.Average or op=hvd.Sum, not {op}.")
