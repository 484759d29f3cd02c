"""Flat slices of variables as rectangles, for checkpoints of any layout."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfbig.checkpoint_format import LazyArray, Slice
from tfbig.rectangle import Rectangle, intersect, rectangles_of_range
from trainers.base import StateReader
from trainers.flat_buckets import FlatBucket
from trainers.tensor_table import Shard


class _Region(NamedTuple):
    """A rectangle of this rank's variable and the range of a bucket's part that holds it."""

    path: str
    bucket: int
    begin: int
    end: int
    local: Rectangle  # in the rank's variable
    valid: Rectangle  # what of that is no padding


class FlatState:
    """Where a rank's parts of the buckets stand in the model's variables.

    Args:
      buckets: of the rank's variables.
      part: which part of each is here.
      shards: what the rank's variables are of the model's, by path.
    """

    def __init__(
        self, buckets: Sequence[FlatBucket], part: int, shards: Mapping[str, Shard]
    ) -> None:
        self._shards = shards
        self._paths = [path for bucket in buckets for path in bucket.paths]
        self._regions: list[_Region] = []
        for index, bucket in enumerate(buckets):
            for piece in bucket.pieces(part):
                shard = shards[piece.path]
                whole = Rectangle((0,) * len(shard.valid_shape), shard.valid_shape)
                begin = piece.offset
                for local in rectangles_of_range(shard.local_shape, piece.start, piece.stop):
                    end = begin + local.volume
                    valid = intersect(local, whole)
                    if valid is not None:
                        region = _Region(piece.path, index, begin, end, local, valid)
                        self._regions.append(region)
                    begin = end

    def slices(self, prefix: str, parts: Sequence[tf.Tensor | tf.Variable]) -> Iterator[Slice]:
        """Yields this rank's rectangles of weights (prefix "") or of a slot.

        Args:
          prefix: of the path in the checkpoint.
          parts: (part_size,) of each bucket.
        """
        for region in self._regions:
            shard = self._shards[region.path]

            def load(region: _Region = region) -> np.ndarray:
                flat = parts[region.bucket][region.begin : region.end].numpy()
                inner = region.valid.relative_to(region.local.start)
                return flat.reshape(region.local.shape)[inner.slices]

            array = LazyArray(region.valid.shape, np.float32, load)
            start = self._global_start(region)
            path = prefix + region.path
            yield Slice(path, shard.global_shape, start, array, shard.is_counted_in_replica)

    def load(self, reader: StateReader, prefix: str, parts: Sequence[tf.Variable]) -> list[str]:
        """Fills the parts from a checkpoint of any layout; returns the paths that it lacks."""
        missing = [prefix + path for path in self._paths if not reader.has(prefix + path)]
        values = [part.numpy().copy() for part in parts]
        for region in self._regions:
            path = prefix + region.path
            if path in missing:
                continue
            flat = values[region.bucket][region.begin : region.end]
            inner = region.valid.relative_to(region.local.start)
            found = reader.read(path, self._global_start(region), region.valid.shape)
            flat.reshape(region.local.shape)[inner.slices] = found
        for part, value in zip(parts, values, strict=True):
            part.assign(value)
        return missing

    def _global_start(self, region: _Region) -> tuple[int, ...]:
        shard_start = self._shards[region.path].start
        return tuple(a + b for a, b in zip(region.valid.start, shard_start, strict=True))
