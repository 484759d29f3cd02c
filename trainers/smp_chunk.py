"""What Stepper runs of a script's step: its two halves, microbatch by microbatch, in order."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from trainers.pipeline_link import Intervals, Link
from trainers.script_session import Order
from trainers.smp_trace import Spec


class Halves(NamedTuple):
    """A stage's functions: (inputs, hidden) -> (ends, kept), and back to gradients."""

    forward: Callable
    backward: Callable  # (inputs, hidden, kept, upstream) -> (gradients, hidden's)
    hidden_shape: list[int]
    num_ends: int
    num_kept: int
    num_gradients: int
    is_first: bool
    is_last: bool


class ScriptChunk:
    """In the place of Chunk.

    Args:
      halves: of the stage.
      parts: tensors of each microbatch.
      order: of the graph's operations.

    Attributes:
      outputs: what the last stage's function returned besides gradients, by microbatch.
      gradients: by microbatch.
    """

    def __init__(
        self, halves: "Halves", parts: Sequence[Sequence[tf.Tensor]], order: Order
    ) -> None:
        self._halves, self._parts, self._order = halves, parts, order
        self._pending: dict[int, tuple[list[tf.Tensor], list[tf.Tensor]]] = {}
        self.outputs: dict[int, list[tf.Tensor]] = {}
        self.gradients: dict[int, list[tf.Tensor]] = {}

    def begin(self, values: Mapping[str, tf.Variable] | None = None) -> None:
        """As Chunk's; a script's variables have no stand-ins."""
        assert values is None

    def end(self) -> None:
        """As Chunk's; the functions read the variables themselves."""

    def forward(
        self, hidden: tf.Tensor | None, batch: Any, index: int, num_microbatches: int, step: Any
    ) -> tf.Tensor | None:
        """Returns the hidden state that leaves the stage, None on the last one."""
        halves, feeds = self._halves, list(self._parts[index])
        if hidden is not None:
            feeds.append(tf.reshape(hidden, halves.hidden_shape))
        results = self._call(halves.forward, feeds)
        ends, kept = results[: halves.num_ends], results[halves.num_ends :][: halves.num_kept]
        self._pending[index] = feeds, kept
        if not halves.is_last:
            return ends[0]
        self.outputs[index] = ends
        return None

    def backward(self, index: int, upstream: tf.Tensor | None) -> tf.Tensor | None:
        """Returns the gradient of what the stage got, None on the first one."""
        halves = self._halves
        feeds, kept = self._pending.pop(index)
        given = [] if upstream is None else [tf.reshape(upstream, halves.hidden_shape)]
        results = self._call(halves.backward, [*feeds, *kept, *given])
        self.gradients[index] = results[: halves.num_gradients]
        return None if halves.is_first else results[halves.num_gradients]

    def _call(self, half: Callable, feeds: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        with self._order.after():
            results = [result for result in half(*feeds) if result is not None]
        self._order.note(results[:1])
        return results


class OrderedLink:
    """A link whose exchanges take their place among a graph's other operations."""

    def __init__(self, link: Link, order: Order) -> None:
        self._link, self._order = link, order

    def exchange(
        self, send: tf.Tensor | None, receives: bool, shape: Sequence[int]
    ) -> tuple[tf.Tensor | None, Intervals]:
        """Returns as Link's."""
        with self._order.after():
            send = None if send is None else tf.identity(send)
            value, intervals = self._link.exchange(send, receives, shape)
        self._order.note([*intervals.values()] if value is None else [value])
        return value, intervals


def message_shape(hidden: Spec | None) -> tuple[int, int, int]:
    """Returns (rows, length, width) of a hidden state, as a Link sends it."""
    if hidden is None or len(hidden[0]) < 2:
        return 1, 1, hidden[0][0] if hidden and hidden[0] else 1
    first, *middle, width = hidden[0]
    return first, functools.reduce(int.__mul__, middle, 1), width
