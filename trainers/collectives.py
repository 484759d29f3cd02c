"""The only file that imports horovod.tensorflow: collectives on named groups of ranks.

Rules that the functions here rely on (docs/design.md tells what happens without each):
- They are called only inside tf.functions: eager Horovod ignores names and can sum the wrong
  tensors silently.
- Every call has a fixed name, the same on all ranks, and its input is used by no other collective.
- Every output leaves every enclosing function: is returned or assigned.
- None stands in a tf.cond, a loop or a nested function.
"""

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import auto_control_deps
from tensorflow.python.framework import config as tf_config

from tfbig.horovod_build import check_installed

check_installed()  # before an import that fails obscurely when TensorFlow has changed
import horovod.tensorflow as hvd  # noqa: E402
from horovod.tensorflow import mpi_ops  # noqa: E402

HALVES = (tf.bfloat16, tf.float16)
OPERATIONS = {"sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max}
AGREE, BROADCAST, BARRIER, DIFFERS = "agree", "broadcast", "barrier", "differs"


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


def _has_time() -> bool:
    """Whether graphs may ask for the time: TF refuses that where results must be deterministic."""
    return not tf_config.is_op_determinism_enabled()


class Clock:
    """Collects, while one function is traced, when its collectives were in flight."""

    def __init__(self) -> None:
        self._intervals: dict[str, list[tf.Tensor]] = {}

    def around(
        self, axis: str, inputs: Sequence[tf.Tensor], call: Callable[[], list[tf.Tensor]]
    ) -> list[tf.Tensor]:
        """Returns call()'s outputs, noting the time before and after.

        Args:
          axis: mesh axis the time counts for.
          inputs: must be there before the clock starts.
          call: makes the collective and returns its outputs.
        """
        if not _has_time():
            return call()
        with tf.control_dependencies(list(inputs)):
            start = tf.timestamp()
        with tf.control_dependencies([start]):
            outputs = call()
        with tf.control_dependencies(list(outputs)):
            stop = tf.timestamp()
        self._intervals.setdefault(axis, []).append(tf.stack([start, stop]))
        return outputs

    def intervals(self) -> dict[str, tf.Tensor]:
        """Returns (n, 2) start and stop times by axis; the traced function must return them."""
        return {axis: tf.stack(pairs) for axis, pairs in self._intervals.items()}


class Stopwatch:
    """Adds up, in a variable, the seconds collectives were in flight.

    For functions whose outputs are not ours to choose, such as a backward pass that TensorFlow
    makes. Collectives that run side by side are counted twice.
    """

    def __init__(self) -> None:
        self.seconds = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="seconds")

    def around(
        self, axis: str, inputs: Sequence[tf.Tensor], call: Callable[[], list[tf.Tensor]]
    ) -> list[tf.Tensor]:
        """Returns call()'s outputs, which wait until the time is noted."""
        with tf.control_dependencies(list(inputs)):
            start = tf.timestamp()
        with tf.control_dependencies([start]):
            outputs = call()
        with tf.control_dependencies(list(outputs)):
            elapsed = tf.timestamp() - start
        with tf.control_dependencies([self.seconds.assign_add(elapsed)]):
            return [tf.identity(output) for output in outputs]

    def take(self) -> float:
        """Returns the seconds since the last call."""
        seconds = float(self.seconds)
        self.seconds.assign(0.0)
        return seconds


Timer = Clock | Stopwatch


def seconds_in_flight(intervals: np.ndarray) -> float:
    """Returns how long at least one of the (n, 2) intervals was open.

    >>> seconds_in_flight(np.array([[0.0, 2.0], [1.0, 3.0], [5.0, 6.0]]))
    4.0
    """
    total, reached = 0.0, -np.inf
    for start, stop in sorted(map(tuple, np.asarray(intervals))):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return float(total)


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
        wide = _summable(tensor)
        reduced = self._run(
            [wide],
            clock,
            lambda: mpi_ops._allreduce(
                wide,
                name=self._name(name),
                op=OPERATIONS[op],
                ignore_name_scope=True,
                process_set=self._process_set,
            ),
        )
        return tf.cast(reduced, tensor.dtype)

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
        wide = _summable(tensor)
        scattered = self._run(
            [wide],
            clock,
            lambda: mpi_ops._reducescatter(
                wide,
                name=self._name(name),
                op=hvd.Sum,
                ignore_name_scope=True,
                process_set=self._process_set,
            ),
        )
        return tf.cast(scattered, tensor.dtype)

    def all_gather(self, tensor: tf.Tensor, name: str, clock: Timer | None = None) -> tf.Tensor:
        """Returns the group's tensors, joined along the first dim in order of rank."""
        if self.size == 1:
            return tf.identity(tensor)
        bits = _movable(tensor)
        gathered = self._run(
            [bits],
            clock,
            lambda: mpi_ops.allgather(
                bits,
                name=self._name(name),
                ignore_name_scope=True,
                process_set=self._process_set,
            ),
        )
        gathered = tf.bitcast(gathered, tensor.dtype) if bits is not tensor else gathered
        if tensor.shape.is_fully_defined():
            gathered = tf.ensure_shape(gathered, [tensor.shape[0] * self.size, *tensor.shape[1:]])
        return gathered

    def broadcast(
        self, tensor: tf.Tensor, root: int, name: str, clock: Timer | None = None
    ) -> tf.Tensor:
        """Returns the tensor of the group's member number `root`; shapes must be equal."""
        if self.size == 1:
            return tf.identity(tensor)
        bits = _movable(tensor)
        received = self._run(
            [bits],
            clock,
            lambda: mpi_ops.broadcast(
                bits,
                self.ranks[root],
                name=self._name(name),
                ignore_name_scope=True,
                process_set=self._process_set,
            ),
        )
        return tf.bitcast(received, tensor.dtype) if bits is not tensor else received

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
        bits = _movable(tensor)
        splits = tf.constant(list(counts), tf.int32)
        received = self._run(
            [bits],
            clock,
            lambda: mpi_ops.alltoall(
                bits,
                splits=splits,
                name=self._name(name),
                ignore_name_scope=True,
                process_set=self._process_set,
            )[0],
        )
        return tf.bitcast(received, tensor.dtype) if bits is not tensor else received

    def _name(self, name: str) -> str:
        # Horovod cuts a name off at its last slash when it ignores the name scope.
        return f"{self.axis}.{name}".replace("/", ".")

    def _run(
        self, inputs: list[tf.Tensor], clock: Timer | None, call: Callable[[], tf.Tensor]
    ) -> tf.Tensor:
        assert not tf.executing_eagerly(), "collectives are called inside tf.functions only"
        if clock is None or not _has_time():
            return call()
        return clock.around(self.axis, inputs, lambda: [call()])[0]


def _summable(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor with a dtype in which sums over ranks are exact enough."""
    return tf.cast(tensor, tf.float32) if tensor.dtype in (tf.bfloat16, tf.float16) else tensor


def _movable(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor with a dtype that Horovod moves; it knows no bfloat16."""
    return tf.bitcast(tensor, tf.uint16) if tensor.dtype == tf.bfloat16 else tensor


class Engine:
    """Horovod, started in this process.

    Args:
      groups: ranks of each further group, by axis name; the same on all ranks, as Horovod makes
        every set everywhere. A group of all ranks needs no set of its own, one of a single rank
        none at all.
      deterministic: reduces each tensor by itself. With three or more ranks a sum depends on
        which tensors timing fuses.
      gloo_timeout: seconds after which a silent peer counts as dead.
    """

    def __init__(
        self,
        groups: Sequence[tuple[str, Sequence[int]]] = (),
        deterministic: bool = False,
        gloo_timeout: int = 120,
    ) -> None:
        os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(gloo_timeout))
        os.environ["HOROVOD_FUSION_THRESHOLD"] = "0" if deterministic else str(128 << 20)
        _order_insensitive()
        sets: dict[tuple[int, ...], Any] = {}
        for _, ranks in groups:
            if len(ranks) > 1:
                sets.setdefault(tuple(ranks), hvd.ProcessSet(list(ranks)))
        world_size = int(os.environ.get("HOROVOD_SIZE", "1"))
        everyone = tuple(range(world_size))
        sets.pop(everyone, None)
        hvd.init(process_sets=list(sets.values()) or None)
        assert hvd.size() == world_size or "HOROVOD_SIZE" not in os.environ
        self.rank, self.size = hvd.rank(), hvd.size()
        self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()
        sets[tuple(range(self.size))] = hvd.global_process_set
        self.world = Group("world", range(self.size), hvd.global_process_set, self.rank)
        self.groups = [
            Group(axis, ranks, sets.get(tuple(ranks)), self.rank) for axis, ranks in groups
        ]
        self._functions: dict[Any, Callable] = {}

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

        def extremes(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            low = self.world.all_reduce(x, f"{DIFFERS}_min", "min")
            return low, self.world.all_reduce(x + 0, f"{DIFFERS}_max", "max")

        low, high = self._function(DIFFERS, extremes, len(values))(tf.constant(values, tf.int64))
        return (low != high).numpy()

    def broadcast(self, array: np.ndarray) -> np.ndarray:
        """Returns rank 0's array."""
        tensor = tf.convert_to_tensor(array)
        key = (tensor.dtype.name, tuple(tensor.shape))
        name = f"{BROADCAST}_{key[0]}_{'x'.join(map(str, key[1]))}"
        run = self._function(BROADCAST, lambda x: self.world.broadcast(x, 0, name), key)
        return run(tensor).numpy()

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

    def close(self) -> None:
        """Shuts Horovod down, after which another Engine can start."""
        hvd.shutdown()

    def _function(self, kind: str, body: Callable, key: Any) -> Callable:
        if (kind, key) not in self._functions:
            self._functions[kind, key] = tf.function(body, autograph=False)
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
    if clock is not None and hvd.size() > 1 and _has_time():
        reduce = wrapped._allreduce_grads  # of the pinned release

        def timed(gradients: list[tf.Tensor], variables: list, generic: bool) -> list[tf.Tensor]:
            return clock.around("data", gradients, lambda: reduce(gradients, variables, generic))

        wrapped._allreduce_grads = timed
    return wrapped
