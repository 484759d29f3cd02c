"""Which source each sample of a run is from: the mixture's segments as a pure function.

A segment's round takes rows x weight samples of every source: weight 1 takes every row once. A
round is cut into blocks in which each source has its exact share, to within one sample, in a fixed
random order. A source's samples are its own stream, which goes on from segment to segment: changing
weights repeats and skips nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from data_pipeline.permutation import mix_bits

BLOCK_SAMPLES = 1024  # about so many samples make a block


class _Segment:
    """One mixture, from its first sample on.

    Args:
      first: sample.
      samples: (num_sources,) samples of each source in one round.
      offsets: (num_sources,) samples that earlier segments took of each source.
    """

    def __init__(self, first: int, samples: np.ndarray, offsets: np.ndarray) -> None:
        self.first, self._samples, self._offsets = first, samples, offsets
        self.round = int(samples.sum())
        assert self.round > 0
        self._num_blocks = -(-self.round // BLOCK_SAMPLES)
        numbers = np.arange(self._num_blocks + 1, dtype=np.int64)
        self._starts = np.zeros(len(numbers), np.int64)  # of blocks, within the round
        for count in samples:
            self._starts += self._before(int(count), numbers)

    def _before(self, count: int, block: np.ndarray) -> np.ndarray:
        """Returns how many of a source's `count` samples come before a block, exactly."""
        whole, rest = divmod(count, self._num_blocks)
        return whole * block + rest * block // self._num_blocks

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source of each position, and its number in the source's stream."""
        rounds, places = np.divmod(positions - self.first, self.round)
        blocks = np.searchsorted(self._starts, places, side="right") - 1
        numbers = rounds * self._num_blocks + blocks
        wanted, which = np.unique(numbers, return_inverse=True)
        pattern, index, starts = self._slots(wanted)
        slots = starts[which] + places - self._starts[blocks]
        return pattern[slots], index[slots]

    def _slots(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns all samples of some blocks.

        Args:
          numbers: (n,) of blocks, counted over all rounds.

        Returns:
          source and number in the source's stream of each sample of the blocks, in their order,
          and (n,) the first sample of each block among these.
        """
        rounds, blocks = np.divmod(numbers, self._num_blocks)
        before = np.stack([self._before(int(count), blocks) for count in self._samples], axis=1)
        after = np.stack([self._before(int(count), blocks + 1) for count in self._samples], axis=1)
        counts = after - before  # (n, num_sources)
        num_sources = counts.shape[1]
        groups = np.repeat(np.arange(counts.size), counts.ravel())  # (samples,) block and source
        of_block, sources = np.divmod(groups, num_sources)
        sizes = counts.sum(axis=1)
        starts = np.cumsum(sizes) - sizes
        if num_sources > 1:  # spread each source over its block
            slots = np.arange(len(groups)) - starts[of_block]
            keys = mix_bits(mix_bits(numbers.astype(np.uint64)))[of_block]
            spread = np.lexsort((mix_bits(keys ^ slots.astype(np.uint64)), of_block))
            groups, sources = groups[spread], sources[spread]
        in_order = np.argsort(groups, kind="stable")
        firsts = np.cumsum(counts.ravel()) - counts.ravel()
        rank = np.empty(len(groups), np.int64)
        rank[in_order] = np.arange(len(groups)) - firsts[groups[in_order]]
        base = self._offsets + rounds[:, None] * self._samples + before  # (n, num_sources)
        return sources.astype(np.int32), base.ravel()[groups] + rank, starts

    def counts(self, stop: int) -> np.ndarray:
        """Returns how many samples of each source come before the run's sample `stop`."""
        rounds, place = divmod(stop - self.first, self.round)
        block = int(np.searchsorted(self._starts, place, side="right")) - 1
        sources, _, _ = self._slots(np.array([rounds * self._num_blocks + block]))
        inside = np.bincount(
            sources[: place - int(self._starts[block])], minlength=len(self._samples)
        )
        numbers = np.array([block])
        before = [int(self._before(int(count), numbers)[0]) for count in self._samples]
        return self._offsets + rounds * self._samples + np.array(before) + inside


class Schedule:
    """The segments of a mixture.

    Args:
      segments: {"first_sample", "weights" by source} each, the first from sample 0.
      names: of the sources, by index; one that a segment does not name has weight 0 in it.
      source_rows: rows of each source.
    """

    def __init__(
        self, segments: Sequence[Mapping[str, Any]], names: Sequence[str], source_rows: np.ndarray
    ) -> None:
        self._segments: list[_Segment] = []
        offsets = np.zeros(len(names), np.int64)
        if not source_rows.sum():
            return
        for described in segments:
            first = described["first_sample"]
            if self._segments:
                offsets = self._segments[-1].counts(first)
            weights = np.array([described["weights"].get(name, 0.0) for name in names])
            samples = np.rint(source_rows * weights).astype(np.int64)
            # A small share is a share; what has no rows or no weight has none.
            samples[(samples == 0) & (weights > 0) & (source_rows > 0)] = 1
            self._segments.append(_Segment(first, samples, offsets))
        self._firsts = np.array([segment.first for segment in self._segments], np.int64)

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source (n,) int32 of each position, and its number in the source's stream."""
        which = np.searchsorted(self._firsts, positions, side="right") - 1
        sources = np.empty(len(positions), np.int32)
        indices = np.empty(len(positions), np.int64)
        for number in np.unique(which):
            chosen = np.flatnonzero(which == number)
            found = self._segments[number].locate(positions[chosen])
            sources[chosen], indices[chosen] = found
        return sources, indices

    def counts(self, num_samples: int) -> np.ndarray:
        """Returns how many of the run's first samples are of each source."""
        which = int(np.searchsorted(self._firsts, num_samples, side="right")) - 1
        return self._segments[which].counts(num_samples)
