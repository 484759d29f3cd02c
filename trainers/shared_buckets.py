"""Flat buckets of which each rank of a group keeps a part, and how they come together again."""

from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from trainers.clock import Clock
from trainers.collectives import Group
from trainers.flat_buckets import FlatBucket
from trainers.flat_state import FlatState
from trainers.tensor_table import Shard


class SharedBuckets:
    """Buckets of a rank's variables and its own part of each.

    Args:
      buckets: of the variables.
      group: whose ranks share them.
      shards: what the rank's variables are of the model's, by path.

    Attributes:
      state: where the parts stand in the model's variables.
    """

    def __init__(
        self, buckets: Sequence[FlatBucket], group: Group, shards: Mapping[str, Shard]
    ) -> None:
        self.buckets, self.shards = list(buckets), shards
        self.state = FlatState(buckets, group.rank, shards)
        self._group = group

    def new_parts(self, name: str) -> list[tf.Variable]:
        """Returns a variable of zeros (part_size,) for each bucket."""
        return [
            tf.Variable(tf.zeros([bucket.part_size]), trainable=False, name=name)
            for bucket in self.buckets
        ]

    def own(self, index: int, value_of: Callable[[str], tf.Tensor]) -> tf.Tensor:
        """Returns this rank's part (part_size,) of a bucket.

        Args:
          index: of the bucket.
          value_of: path -> the rank's whole float32 value.
        """
        bucket = self.buckets[index]
        pieces = bucket.pieces(self._group.rank)
        parts = [tf.reshape(value_of(p.path), [-1])[p.start : p.stop] for p in pieces]
        missing = bucket.part_size - sum(piece.stop - piece.start for piece in pieces)
        return tf.concat([*parts, tf.zeros([missing])], 0)  # (part_size,)

    def gathered(
        self, index: int, part: tf.Tensor, name: str, clock: Clock | None
    ) -> dict[str, tf.Tensor]:
        """Returns a bucket's tensors, by path, of all ranks' parts.

        Args:
          index: of the bucket.
          part: (part_size,), this rank's.
          name: of the collective.
          clock: notes the time in flight.
        """
        bucket = self.buckets[index]
        flat = self._group.all_gather(part, name, clock)
        return {
            path: tf.reshape(value, self.shards[path].local_shape)
            for path, value in zip(bucket.paths, split(bucket, flat), strict=True)
        }

    def read_gathered(
        self,
        index: int,
        part: tf.Variable,
        name: str,
        after: Sequence[tf.Tensor],
        clock: Clock | None,
    ) -> dict[str, tf.Tensor]:
        """Returns what `gathered` does, of a variable that is read when `after` is there."""
        with tf.control_dependencies(list(after)):
            value = tf.identity(part.read_value())
        return self.gathered(index, value, name, clock)


def joined(bucket: FlatBucket, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns a bucket's tensors end to end in float32, padded."""
    flat = [tf.reshape(tf.cast(tensor, tf.float32), [-1]) for tensor in tensors]
    return tf.concat([*flat, tf.zeros([bucket.padding])], 0)  # (num_parts * part_size,)


def split(bucket: FlatBucket, flat: tf.Tensor) -> list[tf.Tensor]:
    """Returns the flat values of a bucket's variables."""
    return tf.split(flat, [*bucket.sizes, bucket.padding])[:-1]
