"""The data order as a pure function: sample position -> (epoch, source, shard, row).

Nothing here has state: a run resumes at any position, at any world size, by asking again.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from data_pipeline.permutation import hash_with_seed, mix_bits, permute
from data_pipeline.schedule import Schedule

# Named in the manifest: another function of (seed, manifest) gets another number.
ORDER_VERSION = 2
WINDOW_BLOCKS = 64  # blocks among whose rows a row is permuted


class Place(NamedTuple):
    """Where samples are stored; one entry a sample."""

    epoch: np.ndarray  # (n,) int64: how often the whole split came before
    source: np.ndarray  # (n,) int32: index into the manifest's sources
    shard: np.ndarray  # (n,) int64: index into the split's shards
    row: np.ndarray  # (n,) int64: of the shard


class RowOrder:
    """The order of one source's rows: each epoch is another permutation of all of them.

    Blocks of neighbouring rows are permuted over the whole source, and rows within windows of
    `WINDOW_BLOCKS` blocks, so that a file system reads whole blocks. Documents are shuffled before
    they are packed, so neighbours in a block have nothing to do with each other. With blocks of one
    row, rows are permuted over the whole source.

    Args:
      num_rows: of the source.
      block_rows: rows of a block.
    """

    def __init__(self, num_rows: int, block_rows: int) -> None:
        self.num_rows = num_rows
        # What fits one window needs no blocks.
        self._block = 1 if num_rows <= block_rows * WINDOW_BLOCKS else block_rows

    def locate(self, positions: np.ndarray, key: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the epoch and the row of each position of the source's endless stream.

        Args:
          positions: (n,) int64, at least 0.
          key: of seed and source.
        """
        epochs, indices = np.divmod(positions, self.num_rows)
        # One key where all samples are of one epoch, as nearly always: it saves a third.
        one_epoch = len(epochs) > 0 and epochs[0] == epochs[-1] and (epochs == epochs[0]).all()
        keys = hash_with_seed(key, (epochs[:1] if one_epoch else epochs).astype(np.uint64))
        if self._block == 1:
            return epochs, permute(indices, self.num_rows, keys)
        window_rows = self._block * WINDOW_BLOCKS
        windows, places = np.divmod(indices, window_rows)
        inside = np.empty_like(indices)
        for window in np.unique(windows):
            chosen = np.flatnonzero(windows == window)
            size = min(window_rows, self.num_rows - int(window) * window_rows)
            own = keys if one_epoch else keys[chosen]
            window_keys = mix_bits(own ^ mix_bits(np.array([window], np.uint64)))
            inside[chosen] = permute(places[chosen], size, window_keys)
        blocks, rows = np.divmod(windows * window_rows + inside, self._block)
        num_whole = self.num_rows // self._block
        # The rows behind the last whole block stay behind all blocks.
        whole = np.flatnonzero(blocks < num_whole)
        block_keys = mix_bits(keys if one_epoch else keys[whole])
        blocks[whole] = permute(blocks[whole], num_whole, block_keys)
        return epochs, blocks * self._block + rows


class DataOrder:
    """The order of one split: sources interleaved by the mixture, each in its own row order.

    Args:
      shard_rows: rows of each shard, in the manifest's order.
      shard_sources: index of each shard's source.
      names: of the sources, by index.
      mixture: the manifest's segments; None means one, of weight 1 for every source.
      block_rows: rows of a block.

    Attributes:
      num_rows: of all shards.
      schedule: of the mixture.
    """

    def __init__(
        self,
        shard_rows: Sequence[int],
        shard_sources: Sequence[int],
        names: Sequence[str],
        mixture: Sequence[Mapping[str, Any]] | None = None,
        block_rows: int = 1,
    ) -> None:
        rows, sources = np.asarray(shard_rows, np.int64), np.asarray(shard_sources, np.int32)
        self._ends = np.cumsum(rows)
        self._starts = self._ends - rows
        self._sources = sources
        self.num_rows = int(self._ends[-1]) if len(self._ends) else 0
        self._source_rows = np.zeros(len(names), np.int64)
        np.add.at(self._source_rows, sources, rows)
        # A source's shards, and its rows up to the end of each.
        self._shards = [np.flatnonzero(sources == index) for index in range(len(names))]
        self._shard_ends = [np.cumsum(rows[shards]) for shards in self._shards]
        self.block_rows = block_rows
        self._orders = [RowOrder(int(count), block_rows) for count in self._source_rows]
        self._names = tuple(names)
        segments = mixture or [{"first_sample": 0, "weights": dict.fromkeys(names, 1.0)}]
        self.schedule = Schedule(segments, self._names, self._source_rows)

    def locate(self, positions: np.ndarray, seed: int) -> Place:
        """Returns where the samples at `positions` of a run's stream are.

        Args:
          positions: (n,) int64, at least 0, not bounded by the number of rows.
          seed: of the run.
        """
        assert self.num_rows > 0
        sources, indices = self.schedule.locate(np.asarray(positions, np.int64))
        epochs, shards, rows = (np.empty(len(sources), np.int64) for _ in range(3))
        for source in np.unique(sources):
            chosen = np.flatnonzero(sources == source)
            key = source_key(seed, self._names[source])
            epochs[chosen], of_source = self._orders[source].locate(indices[chosen], key)
            place = np.searchsorted(self._shard_ends[source], of_source, side="right")
            shards[chosen] = self._shards[source][place]
            before = np.concatenate([[0], self._shard_ends[source]])[place]
            rows[chosen] = of_source - before
        return Place(epochs, sources, shards, rows)

    def locate_sequential(self, positions: np.ndarray) -> Place:
        """Returns where the samples are when a split is read once, from its first row on.

        Args:
          positions: (n,) int64 in range(num_rows).
        """
        positions = np.asarray(positions, np.int64)
        shards = np.searchsorted(self._ends, positions, side="right")
        rows = positions - self._starts[shards]
        return Place(np.zeros_like(positions), self._sources[shards], shards, rows)


def source_key(seed: int, name: str) -> int:
    """Returns the key of a source's row order: of its name, so that others may come and go."""
    digest = blake2b(name.encode(), digest_size=8).digest()
    value = np.array([int.from_bytes(digest, "little")], np.uint64)
    return int(hash_with_seed(seed, value)[0])
