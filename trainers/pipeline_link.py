"""Hidden states and gradients on their way between two pipeline ranks."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from trainers.clock import Clock
from trainers.collectives import Group

Intervals = dict[str, tf.Tensor]


class Link:
    """The way to one other pipeline rank.

    Both directions travel in one all-to-all on the pair's process set. Which of them carry
    something is known from the program on both sides, and each combination has its own name, so
    that shapes under a name never change and Horovod's cache answers.

    Args:
      group: the two ranks.
      dtype: of hidden states and their gradients: the compute dtype.
    """

    def __init__(self, group: Group, dtype: tf.DType) -> None:
        assert group.size == 2
        self._group, self._dtype = group, dtype
        self._functions: dict[tuple, Callable] = {}

    def exchange(
        self, send: tf.Tensor | None, receives: bool, shape: Sequence[int]
    ) -> tuple[tf.Tensor | None, Intervals]:
        """Sends a hidden state (b, T, D), or nothing, and returns what the other rank sent.

        Args:
          send: what the other rank waits for.
          receives: whether it sends something.
          shape: (b, T, D) of every message.
        """
        rows, length, width = shape
        key = (send is not None, receives, rows, length, width)
        if key not in self._functions:
            self._functions[key] = self._make(*key)
        nothing = tf.zeros([0, shape[2]], self._dtype) if send is None else send
        received, intervals = self._functions[key](nothing)
        return (received if receives else None), intervals

    def _make(self, sends: bool, receives: bool, rows: int, length: int, width: int) -> Callable:
        directions = {self._group.rank: sends, 1 - self._group.rank: receives}
        way = "up_and_down" if all(directions.values()) else "down" if directions[0] else "up"
        name = f"{way}_{rows}x{length}"
        counts = [0, 0]
        counts[1 - self._group.rank] = rows * length if sends else 0

        @tf.function(autograph=False)
        def run(tensor: tf.Tensor) -> tuple[tf.Tensor, Intervals]:
            clock = Clock()
            flat = tf.reshape(tensor, [-1, width])  # (b*T, D) or (0, D)
            received = self._group.exchange(flat, counts, name, clock)
            if not receives:
                # The output leaves the function all the same: without that it might be pruned.
                return received, clock.intervals()
            return tf.reshape(received, [rows, length, width]), clock.intervals()  # (b, T, D)

        return run
