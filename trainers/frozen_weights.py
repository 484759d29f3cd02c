"""Weights that are not trained, shared by the ranks of a data group (ZeRO-3).

Source: Rajbhandari et al., ZeRO (arXiv 1910.02054, section 5.3).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import tensorflow as tf

from tfbig.checkpoint_format import Slice
from trainers.base import StateReader
from trainers.clock import Clock
from trainers.collectives import Group
from trainers.flat_buckets import FlatBucket
from trainers.shared_buckets import SharedBuckets
from trainers.tensor_table import Shard


class FrozenWeights:
    """One rank's parts of flat buckets that have neither gradients nor slots.

    Args:
      buckets: that the weights lie in.
      group: the data group.
      shards: what the weights are of the model's variables, by path.
      value_of: path -> float32 initial value.
    """

    def __init__(
        self,
        buckets: Sequence[FlatBucket],
        group: Group,
        shards: Mapping[str, Shard],
        value_of: Callable[[str], tf.Tensor],
    ) -> None:
        self._shared = SharedBuckets(buckets, group, shards)
        self.buckets = self._shared.buckets
        self.parts = self._shared.new_parts("frozen")
        for index, part in enumerate(self.parts):
            part.assign(self._shared.own(index, value_of))

    def gather_bucket(
        self, index: int, name: str, after: Sequence[tf.Tensor], clock: Clock | None = None
    ) -> dict[str, tf.Tensor]:
        """Returns a bucket's whole weights, float32, by path; as ShardedOptimizer's."""
        return self._shared.read_gathered(index, self.parts[index], name, after, clock)

    def slices(self) -> Iterator[Slice]:
        """Yields this rank's rectangles of the weights."""
        return self._shared.state.slices("", self.parts)

    def load(self, reader: StateReader) -> list[str]:
        """Fills the weights; returns the paths that the checkpoint lacks."""
        return self._shared.state.load(reader, "", self.parts)
