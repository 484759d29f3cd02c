"""Gathered rows as tf.data: several batches a gather, read ahead, every one a pure function."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from data_pipeline.order import DataOrder, Place

Batch = dict[str, np.ndarray]
# Crossing from numpy to TensorFlow costs most of a millisecond, however much is in it: so much
# crosses at a time. More costs cache misses (benchmarks/data.py).
_GATHER_BYTES = 16 << 20
_MOST_BATCHES = 32
_PREFETCHED_BATCHES = 4
_SAMPLES_AHEAD = 1 << 14  # whose places are computed at once: a small call costs mostly overhead


class PlacesAhead:
    """Positions and places of one process's samples, computed for many steps at a time.

    It remembers and nothing else: what it says of a step depends on no other call.

    Args:
      order: of the split.
      seed: of the run.
      first: this process's first position.
      local: samples of a step.
      stride: positions from one step to the next.
      announce: is told places before their rows are read.
    """

    def __init__(
        self,
        order: DataOrder,
        seed: int,
        first: int,
        local: int,
        stride: int,
        announce: Callable[[Place], None],
    ) -> None:
        self._order, self._seed, self._announce = order, seed, announce
        self._first, self._local, self._stride = first, local, stride
        self._num_steps = max(1, _SAMPLES_AHEAD // local)
        self._known: tuple[int, np.ndarray, Place] | None = None

    def of_steps(self, first: int, count: int) -> tuple[Place, np.ndarray]:
        """Returns the places and the positions of the samples of steps [first, first + count)."""
        found = []
        while count:
            block, number = divmod(first, self._num_steps)
            taken = min(count, self._num_steps - number)
            positions, place = self._of_block(block)
            chosen = slice(number * self._local, (number + taken) * self._local)
            found.append((positions[chosen], *(values[chosen] for values in place)))
            first, count = first + taken, count - taken
        columns = [np.concatenate(parts) for parts in zip(*found, strict=True)]
        return Place(*columns[1:]), columns[0]

    def _of_block(self, block: int) -> tuple[np.ndarray, Place]:
        known = self._known
        if known is None or known[0] != block:
            steps = block * self._num_steps + np.arange(self._num_steps, dtype=np.int64)
            starts = self._first + steps * self._stride
            positions = (starts[:, None] + np.arange(self._local)).ravel()  # (steps * local,)
            known = block, positions, self._order.locate(positions, self._seed)
            self._known = known
            self._announce(known[2])
        return known[1], known[2]


def batches_together(row_bytes: int, local: int) -> int:
    """Returns how many batches are gathered at a time.

    Args:
      row_bytes: of a row as it is handed to TensorFlow.
      local: rows of a batch.
    """
    return int(np.clip(_GATHER_BYTES // (row_bytes * local), 1, _MOST_BATCHES))


def make_dataset(
    read: Callable[[int, int], Batch],
    signature: Mapping[str, tuple[Any, tuple[int, ...]]],
    constants: Mapping[str, Any],
    num_steps: int,
    together: int,
    num_threads: int,
) -> Any:
    """Returns a tf.data.Dataset of batches in their order, with static shapes.

    Args:
      read: (first step, number of steps) -> the rows of those steps, one step after the other.
      signature: {name: dtype, shape} of what `read` gives for one step.
      constants: {name: tensor} that every batch holds as well.
      num_steps: batches.
      together: steps that are read at a time.
      num_threads: reads at the same time; 1 reads in the prefetching thread.
    """
    import tensorflow as tf

    names = tuple(signature)

    def read_block(block: np.ndarray) -> tuple[np.ndarray, ...]:
        # The first batch comes alone: a run that begins or goes on waits for no other.
        first = 1 + (int(block) - 1) * together if block else 0
        count = min(together, num_steps - first) if block else 1
        rows = read(first, count)
        return tuple(
            np.ascontiguousarray(rows[name]).reshape(count, *signature[name][1]) for name in names
        )

    def gather(block: Any) -> dict[str, Any]:
        values = tf.numpy_function(read_block, [block], [dtype for dtype, _ in signature.values()])
        tensors = dict(zip(names, values, strict=True))
        for name, (_, shape) in signature.items():
            tensors[name].set_shape((None, *shape))
        return tensors

    def complete(batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, **constants}

    # AutoGraph reads sources again at run time; there is nothing in these functions for it.
    gather = tf.autograph.experimental.do_not_convert(gather)
    complete = tf.autograph.experimental.do_not_convert(complete)
    num_blocks = 1 + -(-(num_steps - 1) // together) if num_steps else 0
    blocks = tf.data.Dataset.range(num_blocks)
    threads = {} if num_threads <= 1 else {"num_parallel_calls": num_threads}
    dataset = blocks.map(gather, **threads).unbatch()
    if constants:
        dataset = dataset.map(complete)
    options = tf.data.Options()
    options.deterministic = True
    options.autotune.enabled = False
    return dataset.prefetch(_PREFETCHED_BATCHES).with_options(options)
