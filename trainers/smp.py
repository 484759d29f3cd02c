"""SageMaker's model parallelism for scripts that already exist: `import trainers.smp as smp`.

The names and meanings are those of its documentation for TensorFlow (versions 1.1 to 1.15); what
runs is our pipeline. docs/migrating-from-sagemaker.md lists what differs.
"""

import dataclasses
import enum
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tfbig.errors import UserError
from trainers.object_messages import gather_objects
from trainers.script_session import session
from trainers.smp_checkpoint import CheckpointManager
from trainers.smp_config import read_parameters
from trainers.smp_model import DistributedModel
from trainers.smp_output import StepOutput
from trainers.smp_step import step

__all__ = [
    "CheckpointManager",
    "CommGroup",
    "DistributedModel",
    "RankType",
    "StepOutput",
    "allgather",
    "barrier",
    "broadcast",
    "dp_barrier",
    "dp_rank",
    "dp_size",
    "get_dp_group",
    "get_mp_group",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "mp_barrier",
    "mp_rank",
    "mp_size",
    "partition",
    "pp_rank",
    "pp_size",
    "rank",
    "rdp_rank",
    "rdp_size",
    "recv_from",
    "register_post_partition_hook",
    "send",
    "shutdown",
    "size",
    "step",
    "tp_rank",
    "tp_size",
]

# Calls that SageMaker had for PyTorch only, and what does it here.
PYTORCH = {
    "DistributedOptimizer": "--shard_optimizer_state of `tfbig train`",
    "DistributedTransformerLayer": "--tensor_parallel_degree of `tfbig train`",
    "tensor_parallelism": "--tensor_parallel_degree of `tfbig train`",
    "set_tensor_parallelism": "--tensor_parallel_degree of `tfbig train`",
    "tp_register": "--tensor_parallel_degree of `tfbig train`",
    "set_activation_checkpointing": "--activation_checkpointing of `tfbig train`",
    "set_partition": "smp.partition",
    "get_world_process_group": "trainers.hvd",
    "get_mp_process_group": "smp.get_mp_group and smp.allgather",
    "get_dp_process_group": "smp.get_dp_group and trainers.hvd",
    "get_pp_process_group": "smp.get_mp_group",
    "get_tp_process_group": "--tensor_parallel_degree of `tfbig train`",
    "get_rdp_process_group": "smp.get_dp_group",
}


class CommGroup(enum.Enum):
    """Groups of ranks that objects are sent in."""

    WORLD = "world"
    MP_GROUP = "mp"
    DP_GROUP = "dp"
    PP_GROUP = "pp"
    TP_GROUP = "tp"
    RDP_GROUP = "rdp"


class RankType(enum.Enum):
    """What a rank's number counts."""

    WORLD_RANK = "world"
    MP_RANK = "mp"
    DP_RANK = "dp"
    PP_RANK = "pp"
    TP_RANK = "tp"
    RDP_RANK = "rdp"


def init(config: Mapping[str, Any] | None = None) -> None:
    """Starts the engine and cuts the ranks into replicas and stages.

    Args:
      config: SageMaker's parameters; those in the environment variable SM_HP_MP_PARAMETERS go
        before them.

    Raises:
      UserError: a parameter that is unknown or isn't served, with the reason; or a second call.
    """
    shared = session()
    if shared.is_started:
        raise UserError("smp.init() must come first and once: an engine runs already.")
    num_ranks = int(os.environ.get("HOROVOD_SIZE", "1"))
    parameters = read_parameters(config, num_ranks)
    shared.start(parameters.partitions, parameters.placement_strategy)
    shared.pin_device()
    everyone = gather_objects(shared.engine.world, dataclasses.asdict(parameters))
    for other, values in enumerate(everyone):
        if values != everyone[0]:
            raise UserError(f"rank {other} has other smp parameters than rank 0: {values}.")
    shared.parameters = parameters


def shutdown() -> None:
    """Shuts the engine down."""
    session().close()


def is_initialized() -> bool:
    """Returns whether `init` has run."""
    return session().parameters is not None


def rank() -> int:
    """Returns this process's number among all."""
    return session().engine.rank


def size() -> int:
    """Returns the number of processes."""
    return session().engine.size


def local_rank() -> int:
    """Returns this process's number on its host."""
    return session().engine.local_rank


def local_size() -> int:
    """Returns the processes on this host."""
    return session().engine.local_size


def _place(name: str) -> int:
    return session().mesh.ranks_and_sizes(rank())[name]


# Numbers within a replica (mp), its stages (pp), its shards of a layer (tp), and among the
# holders of the same stage (dp) and of the same shard of it (rdp).
mp_rank = functools.partial(_place, "mp_rank")
mp_size = functools.partial(_place, "mp_size")
pp_rank = functools.partial(_place, "pp_rank")
pp_size = functools.partial(_place, "pp_size")
tp_rank = functools.partial(_place, "tp_rank")
tp_size = functools.partial(_place, "tp_size")
dp_rank = functools.partial(_place, "dp_rank")
dp_size = functools.partial(_place, "dp_size")
rdp_rank = functools.partial(_place, "rdp_rank")
rdp_size = functools.partial(_place, "rdp_size")


def get_mp_group() -> list[int]:
    """Returns the ranks that hold one replica with this one."""
    return list(_ranks_of("mp"))


def get_dp_group() -> list[int]:
    """Returns the ranks that hold the same stage as this one."""
    return list(_ranks_of("dp"))


def _ranks_of(kind: str) -> tuple[int, ...]:
    mesh, own = session().mesh, rank()
    if kind == "world":
        return tuple(range(mesh.size))
    if kind == "tp":
        return (own,)
    return mesh.line("pipeline" if kind in ("mp", "pp") else "data", own)


def _group_of(kind: CommGroup) -> Any:
    ranks = _ranks_of(kind.value)
    return session().group("objects", ranks)


def _exchange(other: int, obj: Any) -> Any:
    """Returns the object of another rank, which gets this one's."""
    if other == rank():
        raise UserError("a rank sends objects to others, not to itself.")
    pair = session().group("pair", (rank(), other))
    return gather_objects(pair, obj)[1 - pair.rank]


def send(obj: Any, dest_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> None:
    """Sends an object, and waits until it is received by `recv_from`.

    Args:
      obj: numbers, texts, bytes, arrays, and lists, tuples, sets and dicts of them.
      dest_rank: counted as `rank_type` says.
      rank_type: of RankType.
    """
    _exchange(_ranks_of(rank_type.value)[dest_rank], obj)


def recv_from(src_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> Any:
    """Returns the object that a rank sends or broadcasts."""
    return _exchange(_ranks_of(rank_type.value)[src_rank], None)


def broadcast(obj: Any, group: CommGroup = CommGroup.WORLD) -> None:
    """Sends an object to the others of a group, each of which calls `recv_from`."""
    for other in _ranks_of(group.value):
        if other != rank():
            _exchange(other, obj)


def allgather(obj: Any, group: CommGroup = CommGroup.WORLD) -> list[Any]:
    """Returns the objects of a group's ranks, in order; all of them call it."""
    return gather_objects(_group_of(group), obj)


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Waits for a group's ranks."""
    allgather(None, group)


def mp_barrier() -> None:
    """Waits for the ranks of this replica."""
    barrier(CommGroup.MP_GROUP)


def dp_barrier() -> None:
    """Waits for the holders of the same stage."""
    barrier(CommGroup.DP_GROUP)


@contextmanager
def partition(index: int) -> Iterator[None]:
    """Places the blocks that a model's `call` runs inside on a partition; the innermost wins.

    No effect with auto_partition, as there.
    """
    session().placed.append(index)
    try:
        yield
    finally:
        session().placed.pop()


def register_post_partition_hook(hook: Callable[[], None]) -> Callable[[], None]:
    """Has a function run once the model is cut and its variables exist, before the first step."""
    session().hooks.append(hook)
    return hook


def __getattr__(name: str) -> Any:
    if name in PYTORCH:
        raise AttributeError(
            f"smp.{name} was for PyTorch and isn't served; here it is {PYTORCH[name]}."
        )
    raise AttributeError(f"module trainers.smp has no attribute {name}")
