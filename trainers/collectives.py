"""The only file that imports horovod.tensorflow: collectives on named groups of ranks.

Rules that the functions here rely on (docs/design.md tells what happens without each):
- They are called only inside tf.functions: eager Horovod ignores names and can sum the wrong
  tensors silently.
- Every call has a fixed name, the same on all ranks, and its input is used by no other collective.
- Every output leaves every enclosing function: is returned or assigned.
- None stands in a tf.cond, a loop or a nested function.
"""

import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import auto_control_deps

from tfbig.horovod_build import check_installed
from trainers import stalled
from trainers.clock import Clock, Timer
from trainers.world_size import check_world_size

check_installed()  # before an import that fails obscurely when TensorFlow has changed
import horovod.tensorflow as hvd  # noqa: E402
from horovod.tensorflow import mpi_ops  # noqa: E402

OPERATIONS = {"sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max}
AGREE, BROADCAST, BARRIER = "agree", "broadcast", "barrier"
EXTREME, GATHER = "extreme", "gather"
_HOST = "CPU:0"
_SILENT_SECONDS = 60  # a lost host ends a run of few ranks within 90 s, launcher included


def _order_insensitive() -> None:
    """Lets TF run collectives in any order; call before tracing.

    Our build marks them stateful, so that none is pruned, merged or folded; TF would then run
    them one after the other, at twenty times the cost. The set is private TF API.
    """
    names = (
        "HorovodAllreduce HorovodGroupedAllreduce HorovodAllgather HorovodGroupedAllgather"
        " HorovodBroadcast HorovodReducescatter HorovodGroupedReducescatter HorovodAlltoall"
        " Timestamp"
    )
    auto_control_deps.MUST_RUN_ORDER_INSENSITIVE_STATEFUL_OPS |= set(names.split())


class Group:
    """Ranks that talk among themselves: one group of a mesh axis.

    Args:
      axis: the mesh axis, for names and timings.
      ranks: global ranks, ascending.
      process_set: Horovod's set of these ranks.
      rank: this process's global rank.
    """

    def __init__(self, axis: str, ranks: Sequence[int], process_set: Any, rank: int) -> None:
        self.axis, self.ranks, self._process_set = axis, tuple(ranks), process_set
        self.size = len(self.ranks)
        self.rank = self.ranks.index(rank) if rank in self.ranks else -1

    def all_reduce(
        self,
        tensor: tf.Tensor,
        name: str,
        op: str = "sum",
        clock: Timer | None = None,
    ) -> tf.Tensor:
        """Returns the elementwise sum, min or max over the group; 16 bits are summed in 32."""
        if self.size == 1:
            return tf.identity(tensor)
        return self._sum(mpi_ops._allreduce, tensor, name, clock, op=OPERATIONS[op])

    def reduce_scatter(self, tensor: tf.Tensor, name: str, clock: Timer | None = None) -> tf.Tensor:
        """Returns this rank's share, along the first dim, of the sum over the group.

        Args:
          tensor: first dim divisible by the group's size.
          name: fixed name.
          clock: notes the time in flight.
        """
        if self.size == 1:
            return tf.identity(tensor)
        assert tensor.shape[0] % self.size == 0, f"{tensor.shape[0]} rows over {self.size} ranks"
        # Horovod's default is the average.
        return self._sum(mpi_ops._reducescatter, tensor, name, clock, op=hvd.Sum)

    def all_gather(self, tensor: tf.Tensor, name: str, clock: Timer | None = None) -> tf.Tensor:
        """Returns the group's tensors, joined along the first dim in order of rank."""
        if self.size == 1:
            return tf.identity(tensor)
        gathered = self._move(mpi_ops.allgather, tensor, name, clock)
        if tensor.shape.is_fully_defined():
            gathered = tf.ensure_shape(gathered, [tensor.shape[0] * self.size, *tensor.shape[1:]])
        return gathered

    def broadcast(
        self, tensor: tf.Tensor, root: int, name: str, clock: Timer | None = None
    ) -> tf.Tensor:
        """Returns the tensor of the group's member number `root`; shapes must be equal."""
        if self.size == 1:
            return tf.identity(tensor)
        return self._move(mpi_ops.broadcast, tensor, name, clock, root_rank=self.ranks[root])

    def exchange(
        self, tensor: tf.Tensor, counts: Sequence[int], name: str, clock: Timer | None = None
    ) -> tf.Tensor:
        """Sends rows of the first dim to each member and returns what the members sent here.

        One call carries both directions of a pipeline's hand-over: two opposite calls, one
        behind the other, would wait for each other for ever.

        Args:
          tensor: rows for member 0 first, then for member 1, ...
          counts: rows for each member; they sum to the first dim.
          name: fixed name.
          clock: notes the time in flight.
        """
        if self.size == 1:
            return tf.identity(tensor)
        splits = tf.constant(list(counts), tf.int32)
        return self._move(_alltoall, tensor, name, clock, splits=splits)

    def exchange_counted(
        self, tensor: tf.Tensor, counts: Sequence[int], name: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns what `exchange` does, and how many rows each member sent here, int32."""
        splits = tf.constant(list(counts), tf.int32)
        if self.size == 1:
            return tf.identity(tensor), splits
        is_narrow = tensor.dtype == tf.bfloat16  # as in _move
        sent = tf.bitcast(tensor, tf.uint16) if is_narrow else tensor
        rows, received = self._run(mpi_ops.alltoall, sent, name, None, {"splits": splits})
        return tf.bitcast(rows, tf.bfloat16) if is_narrow else rows, received

    def _sum(
        self, call: Callable, tensor: tf.Tensor, name: str, clock: Timer | None, **options: Any
    ) -> tf.Tensor:
        """Runs a collective that adds; sums of 16-bit numbers are made in 32 bits."""
        half = tensor.dtype in (tf.bfloat16, tf.float16)
        wide = tf.cast(tensor, tf.float32) if half else tensor
        return tf.cast(self._run(call, wide, name, clock, options), tensor.dtype)

    def _move(
        self, call: Callable, tensor: tf.Tensor, name: str, clock: Timer | None, **options: Any
    ) -> tf.Tensor:
        """Runs a collective that only moves; Horovod knows no bfloat16, but its bits."""
        if tensor.dtype != tf.bfloat16:
            return self._run(call, tensor, name, clock, options)
        bits = tf.bitcast(tensor, tf.uint16)
        return tf.bitcast(self._run(call, bits, name, clock, options), tensor.dtype)

    def _run(
        self,
        call: Callable,
        tensor: tf.Tensor,
        name: str,
        clock: Timer | None,
        options: Mapping[str, Any],
    ) -> tf.Tensor:
        assert not tf.executing_eagerly(), "collectives are called inside tf.functions only"

        def run() -> list[tf.Tensor]:
            output = call(
                tensor,
                # Horovod cuts a name off at its last slash when it ignores the name scope.
                name=f"{self.axis}.{name}".replace("/", "."),
                ignore_name_scope=True,
                process_set=self._process_set,
                **options,
            )
            return [output]

        return (run() if clock is None else clock.around(self.axis, [tensor], run))[0]


def _alltoall(tensor: tf.Tensor, **options: Any) -> tf.Tensor:
    """Horovod's, without the counts that were received."""
    return mpi_ops.alltoall(tensor, **options)[0]


def fact(name: str) -> Any:
    """Returns what Horovod answers about its build or its world, e.g. to "mpi_built"."""
    return getattr(mpi_ops, name)()


class Engine:
    """Horovod, started in this process.

    Args:
      groups: ranks of each further group, by axis name; the same on all ranks, as Horovod makes
        every set everywhere. A group of all ranks needs no set of its own, one of a single rank
        none at all.
      deterministic: reduces each tensor by itself. With three or more ranks a sum depends on
        which tensors timing fuses.
      gloo_timeout: seconds after which a silent peer counts as dead; 0 takes 60, and one a rank
        beyond 60 ranks, whose start takes longer.
      hang_timeout: seconds after which a watchdog will ask for `stalled`; 0 for never.
    """

    def __init__(
        self,
        groups: Sequence[tuple[str, Sequence[int]]] = (),
        deterministic: bool = False,
        gloo_timeout: int = 0,
        hang_timeout: float = 0.0,
    ) -> None:
        stalled.check_often(hang_timeout)
        world_size = int(os.environ.get("HOROVOD_SIZE", "1"))
        gloo_timeout = gloo_timeout or max(_SILENT_SECONDS, world_size)
        os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(gloo_timeout))
        os.environ["HOROVOD_FUSION_THRESHOLD"] = "0" if deterministic else str(128 << 20)
        _order_insensitive()
        sets: dict[tuple[int, ...], Any] = {}
        for _, ranks in groups:
            if len(ranks) > 1:
                sets.setdefault(tuple(ranks), hvd.ProcessSet(list(ranks)))
        everyone = tuple(range(world_size))
        sets.pop(everyone, None)
        hvd.init(process_sets=list(sets.values()) or None)
        check_world_size(
            hvd.size(),
            "this launcher does not tell Horovod about the other ranks; start them by horovodrun "
            "or `tfbig launch` (docs/clusters.md)",
        )
        self.rank, self.size = hvd.rank(), hvd.size()
        self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()
        sets[tuple(range(self.size))] = hvd.global_process_set
        self.world = self.everyone("world")
        self.groups = [
            Group(axis, ranks, sets.get(tuple(ranks)), self.rank) for axis, ranks in groups
        ]
        self._functions: dict[Any, Callable] = {}
        self._waits_in = ""

    def everyone(self, axis: str) -> Group:
        """Returns the group of all ranks under the name of an axis."""
        return Group(axis, range(self.size), hvd.global_process_set, self.rank)

    def agree(self, value: int, op: str) -> int:
        """Returns the min, max or sum of a small integer over all ranks."""
        run = self._function(AGREE, lambda x: self.world.all_reduce(x, f"{AGREE}_{op}", op), op)
        return int(run(tf.constant([value], tf.int64))[0])

    def differs(self, values: np.ndarray) -> np.ndarray:
        """Returns where an int64 vector isn't the same on all ranks; equal on every rank.

        The vectors may have different lengths; then everything differs.
        """
        if self.agree(len(values), "min") != self.agree(len(values), "max"):
            return np.ones(len(values), bool)
        return self.extreme(values, "min") != self.extreme(values, "max")

    def extreme(self, values: np.ndarray, op: str) -> np.ndarray:
        """Returns the elementwise "min" or "max" of an int64 vector, of one length on all ranks."""
        name = f"{EXTREME}_{op}_{len(values)}"
        run = self._function(EXTREME, lambda x: self.world.all_reduce(x, name, op), name)
        return run(tf.constant(values, tf.int64)).numpy()

    def gather(self, values: np.ndarray) -> np.ndarray:
        """Returns all ranks' int64 vectors of one length, (ranks x length,) in order of rank."""
        name = f"{GATHER}_{len(values)}"
        run = self._function(GATHER, lambda x: self.world.all_gather(x, name), name)
        return run(tf.constant(values, tf.int64)).numpy()

    def broadcast(self, array: np.ndarray, root: int = 0) -> np.ndarray:
        """Returns one rank's array; shape and dtype are equal on all ranks."""
        array = np.ascontiguousarray(array)
        if array.size == 0:
            return array
        name = f"{BROADCAST}_{root}"
        # As bytes of any number: one graph serves all arrays.
        signature = [tf.TensorSpec([None], tf.uint8)]
        run = self._function(
            BROADCAST, lambda x: self.world.broadcast(x, root, name), root, signature
        )
        sent = run(array.reshape(-1).view(np.uint8))
        return sent.numpy().view(array.dtype).reshape(array.shape)

    def barrier(self, timeout: float) -> None:
        """Waits for all ranks, at most `timeout` seconds; TimeoutError after that."""
        run = self._function(BARRIER, lambda x: self.world.all_reduce(x, BARRIER), None)
        failure: list[BaseException] = []

        def wait() -> None:
            try:
                run(tf.constant([1], tf.int64))
            except Exception as error:  # handed to the caller's thread
                failure.append(error)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        thread.join(timeout)
        if thread.is_alive():
            raise TimeoutError(f"rank {self.rank} waited {timeout:g} s for the other ranks")
        if failure:
            raise failure[0]

    def stalled(self) -> list[str]:
        """Returns what is known of collectives that wait, a line each; for a watchdog's thread.

        It calls none, and takes as long as Horovod may be silent about them.
        """
        own = [f"This rank waits in {self._waits_in}."] if self._waits_in else []
        return own + stalled.heard()

    def close(self) -> None:
        """Shuts Horovod down, after which another Engine can start."""
        hvd.shutdown()

    def _function(self, kind: str, body: Callable, key: Any, signature: Any = None) -> Callable:
        @functools.wraps(body)  # TensorFlow warns of what it takes for one function traced often
        def on_host(tensor: tf.Tensor) -> tf.Tensor:
            # On a GPU it would go by NCCL, which hangs where two ranks share one: before the
            # check that is to find them could say so.
            with tf.device(_HOST):
                return body(tensor)

        if (kind, key) not in self._functions:
            function = tf.function(on_host, autograph=False, input_signature=signature)

            def noted(value: Any) -> Any:
                self._waits_in = f"{self.world.axis}.{kind}" + (f" ({key})" if key else "")
                try:
                    return function(value)
                finally:
                    self._waits_in = ""

            self._functions[kind, key] = noted
        return self._functions[kind, key]


def distributed_tape(tape: tf.GradientTape, clock: Clock | None = None) -> tf.GradientTape:
    """Returns Horovod's tape, which sums gradients over all ranks in one grouped all-reduce.

    The one exception to this file's rules: it names its operations itself. Its sources must be
    plain tf.Variables, and no two of these tapes may be in flight at once.

    Args:
      tape: the recording tape.
      clock: notes the time in flight, for the axis "data".
    """
    wrapped = hvd.DistributedGradientTape(tape, op=hvd.Sum, sparse_as_dense=True, num_groups=1)
    if clock is not None and hvd.size() > 1:
        reduce = wrapped._allreduce_grads  # of the pinned release

        def timed(gradients: list[tf.Tensor], variables: list, generic: bool) -> list[tf.Tensor]:
            return clock.around("data", gradients, lambda: reduce(gradients, variables, generic))

        wrapped._allreduce_grads = timed
    return wrapped
