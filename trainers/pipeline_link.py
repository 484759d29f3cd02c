"""Hidden states and gradients on their way between two pipeline ranks."""

from collections.abc import Callable

import tensorflow as tf

from trainers.collectives import Clock, Group

Intervals = dict[str, tf.Tensor]


class Link:
    """The way to one other pipeline rank.

    Both directions travel in one all-to-all on the pair's process set. Which of them carry
    something is known from the program on both sides, and each combination has its own name, so
    that shapes under a name never change and Horovod's cache answers.

    Args:
      group: the two ranks.
      shape: (b, T, D) of a hidden state.
      dtype: of hidden states and their gradients: the compute dtype.
    """

    def __init__(self, group: Group, shape: tuple[int, int, int], dtype: tf.DType) -> None:
        assert group.size == 2
        self._group, self._shape, self._dtype = group, shape, dtype
        self._functions: dict[str, Callable] = {}
        self._nothing = tf.zeros([0, shape[-1]], dtype)

    def exchange(
        self, send: tf.Tensor | None, receives: bool
    ) -> tuple[tf.Tensor | None, Intervals]:
        """Sends a hidden state (b, T, D), or nothing, and returns what the other rank sent.

        Args:
          send: what the other rank waits for.
          receives: whether it sends something.
        """
        directions = {self._group.rank: send is not None, 1 - self._group.rank: receives}
        name = "up_and_down" if all(directions.values()) else "down" if directions[0] else "up"
        if name not in self._functions:
            self._functions[name] = self._make(name, send is not None, receives)
        return self._functions[name](self._nothing if send is None else send)

    def _make(self, name: str, sends: bool, receives: bool) -> Callable:
        rows, width = self._shape[0] * self._shape[1], self._shape[2]
        counts = [0, 0]
        counts[1 - self._group.rank] = rows if sends else 0

        @tf.function(autograph=False)
        def run(tensor: tf.Tensor) -> tuple[tf.Tensor | None, Intervals]:
            clock = Clock()
            flat = tf.reshape(tensor, [-1, width])  # (b*T, D) or (0, D)
            received = self._group.exchange(flat, counts, name, clock)
            if not receives:  # the output leaves the function all the same, or it might be pruned
                return tf.ensure_shape(received, [0, width]), clock.intervals()
            return tf.reshape(received, self._shape), clock.intervals()  # (b, T, D)

        return run
