"""What a script that calls smp, sdp or hvd shares with these modules: one engine a process."""

import functools
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfbig.errors import UserError
from tfbig.parallel_config import ParallelConfig
from trainers.collectives import Engine, Group
from trainers.devices import driven_gpus, prepare_devices
from trainers.gpu_identity import check_own_gpus, gpu_uuid
from trainers.keras_calls import restore_lost_calls
from trainers.mesh import Mesh, make_mesh, mesh_groups

MOST_PAIRED_RANKS = 8  # up to which every two ranks can send each other objects
Groups = list[tuple[str, tuple[int, ...]]]


class Order:
    """Has operations of one graph run one after the other, as the script's step lists them."""

    def __init__(self) -> None:
        self._last: list[tf.Tensor] = []

    def after(self) -> Any:
        """Returns a scope whose operations wait for what was noted last in this graph."""
        graph = tf.compat.v1.get_default_graph()
        return tf.control_dependencies([tensor for tensor in self._last if tensor.graph is graph])

    def note(self, tensors: Sequence[tf.Tensor]) -> None:
        """Takes down what the next operations wait for; nothing leaves all as it was."""
        self._last = list(tensors) or self._last


class Session:
    """Horovod as a script sees it: the mesh, groups by name, and names for its collectives.

    The scripts' APIs are functions of modules, as rank() is, so what they share is one object a
    process: see `session`.

    Attributes:
      mesh: of all ranks; pure data parallelism unless smp made another one.
      parameters: smp's configuration, None without smp.
      hooks: what smp runs once a model is cut.
      placed: the partitions that the script has named and not left, outermost first.
      trace: the step that is being traced, None outside of one.
      order: of what a step runs.
    """

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._is_shut_down = False
        self._num_names: dict[str, int] = {}
        self._functions: dict[Any, Callable] = {}
        self.mesh = Mesh({"data": 1, "pipeline": 1, "tensor": 1})
        self.parameters: Any = None
        self.hooks: list[Callable[[], None]] = []
        self.placed: list[int] = []
        self.trace: Any = None
        self.order = Order()

    @property
    def is_started(self) -> bool:
        return self._engine is not None

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise UserError(
                "call init() first: no process knows its rank before that."
                if not self._is_shut_down
                else "shutdown() was called: nothing can be sent after that."
            )
        return self._engine

    def start(self, num_partitions: int | None = None, placement: str = "cluster") -> None:
        """Starts Horovod; with partitions, every rank is one stage of a replica.

        Args:
          num_partitions: stages the model is cut into; None where ranks send no objects either.
          placement: of the ranks, as --placement_strategy.

        Raises:
          UserError: the partitions don't divide the ranks.
        """
        self._is_shut_down = False
        restore_lost_calls()
        num_ranks = int(os.environ.get("HOROVOD_SIZE", "1"))
        self.mesh = make_mesh(num_ranks, num_partitions or 1, 1, placement)
        self._engine = Engine(script_groups(self.mesh) if num_partitions else ())

    def pin_device(self) -> None:
        """Gives this process its GPU, if there are any, and its share of the cores."""
        prepare_devices(ParallelConfig(), self.engine.local_rank, self.engine.local_size)
        check_own_gpus(self.engine, [gpu_uuid(number) for number in driven_gpus()])

    def close(self) -> None:
        """Shuts Horovod down; `start` starts it again."""
        if self._engine is not None:
            self._engine.close()
        self.__init__()  # type: ignore[misc]
        self._is_shut_down = True

    def line(self, axis: str) -> Group:
        """Returns this rank's group along "data", "pipeline" or "world"."""
        engine = self.engine
        if axis == "world":
            return engine.world
        return self.group(axis, self.mesh.line(axis, engine.rank))

    def group(self, name: str, ranks: Sequence[int]) -> Group:
        """Returns a group of ranks under a name of the mesh.

        Raises:
          UserError: Horovod has no set of these ranks.
        """
        ranks = tuple(sorted(ranks))
        if len(ranks) == 1:
            return Group(name, ranks, None, self.engine.rank)
        if len(ranks) == self.engine.size:
            return self.engine.everyone(name)
        for group in self.engine.groups:
            if group.ranks == ranks:
                return Group(name, ranks, group._process_set, self.engine.rank)
        raise UserError(
            f"ranks {', '.join(map(str, ranks))} have no set of their own: among more than"
            f" {MOST_PAIRED_RANKS} ranks only those that hold one replica can send to each other."
        )

    def name(self, kind: str, given: str | None = None) -> str:
        """Returns the name of a collective: the script's, or the next of its kind.

        Ranks that trace the same functions in the same order count alike.
        """
        kind = re.sub(r"[^A-Za-z0-9_]+", "_", kind)  # TensorFlow takes no others
        if given:
            return f"{kind}.{given}"
        self._num_names[kind] = self._num_names.get(kind, -1) + 1
        return f"{kind}.{self._num_names[kind]}"

    def in_graph(
        self,
        body: Callable[[tf.Tensor, str], Any],
        tensor: Any,
        kind: str,
        name: str,
        own: Any = None,
    ):
        """Returns body(tensor, name), which holds a collective, from inside a tf.function.

        Args:
          body: makes one collective of that name.
          tensor: its input.
          kind: of collective, options included: what tells two bodies apart.
          name: the script's name for it, or "".
          own: what else tells two bodies apart and differs between ranks; see `shared_name`.
        """
        tensor = unwrapped(tensor)
        if not tf.executing_eagerly():
            return body(tensor, self.name(kind, name))
        key = (kind, name, own, tensor.dtype.name, tuple(tensor.shape))
        if key not in self._functions:
            fixed = self.name(kind, name)
            made = tf.function(lambda x: body(x, fixed), autograph=False)
            self._functions[key] = made.get_concrete_function(tf.TensorSpec.from_tensor(tensor))
        return self._functions[key](tensor)


def shared_name(given: str | None) -> str:
    """Returns a name for a collective whose shapes or counts differ between ranks.

    Outside of a graph each call ends before the next one begins, so that one name serves all: a
    rank makes a function, and would count a name, for each of its own shapes.
    """
    return given or ("rows" if tf.executing_eagerly() else "")


def unwrapped(value: Any) -> tf.Tensor:
    """Returns a tensor of a number, array, tensor, tf.Variable or Keras Variable."""
    if isinstance(value, tf.IndexedSlices):
        return tf.convert_to_tensor(value)
    return tf.convert_to_tensor(getattr(value, "value", value) if is_keras(value) else value)


def is_keras(value: Any) -> bool:
    """Returns whether a value is a Keras Variable, which holds a tf.Variable."""
    return isinstance(getattr(type(value), "value", None), property)


def script_groups(mesh: Mesh) -> Groups:
    """Returns the groups of a script's mesh: stages, replicas, and pairs that send objects."""
    groups = mesh_groups(mesh, is_ring=False, is_tied=False)
    groups += [("pipeline", line) for line in mesh.lines("pipeline")]
    lines = mesh.lines("pipeline") if mesh.size > MOST_PAIRED_RANKS else [tuple(range(mesh.size))]
    for line in lines:
        groups += [("pair", (a, b)) for a in sorted(line) for b in sorted(line) if a < b]
    return groups


@functools.cache
def session() -> Session:
    """Returns the one session of this process."""
    return Session()
