"""A data folder as batches: any sample of the run's stream, in any process, at once."""

import os
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline import manifest
from data_pipeline.feeding import (
    Batch,
    PlacesAhead,
    batches_together,
    make_dataset,
)
from data_pipeline.folder_check import check_shards, check_tokenizer, check_vocabulary
from data_pipeline.order import DataOrder, Place
from data_pipeline.shards import DOCUMENT_IDS, LOSS_MASK, TOKENS, ShardReader
from data_pipeline.tokenizer import Tokenizer
from tfbig.errors import UserError

SAMPLE_INDEX, SOURCE_INDEX = "sample_index", "source_index"
# Processes that share a split's rows: with few, each reads whole blocks ahead, with more, rows.
_FEW_PROCESSES = 4


class _Split:
    """The shards of one split."""

    def __init__(
        self,
        folder: Path,
        contents: Mapping[str, Any],
        shards: list[dict[str, Any]],
        mixture: list[dict[str, Any]] | None,
    ) -> None:
        sources: list[str] = contents["sources"]
        self.order = DataOrder(
            [shard["rows"] for shard in shards],
            [sources.index(shard["source"]) for shard in shards],
            sources,
            mixture,
            contents["order"]["block_rows"],
        )
        self._readers = [
            ShardReader(
                folder / shard["file"], contents["features"], contents["stride"], shard["rows"]
            )
            for shard in shards
        ]

    def read_ahead(self, place: Place, whole_blocks: bool) -> None:
        """Has the kernel read the samples at `place` in the background.

        Args:
          place: of samples that will be read soon.
          whole_blocks: whether the order's blocks are read, which few large reads do.
        """
        unit = self.order.block_rows if whole_blocks else 1
        for index in np.unique(place.shard):
            units = np.unique(place.row[place.shard == index] // unit)
            self._readers[index].read_ahead(units * unit, unit)

    def read(self, name: str, place: Place, dtype: type) -> np.ndarray:
        """Returns one feature of the samples at `place`: (n, length) of `dtype`."""
        if len(self._readers) == 1:
            return self._readers[0].read(name, place.row).astype(dtype)
        result: np.ndarray | None = None
        for index in np.unique(place.shard):
            chosen = np.flatnonzero(place.shard == index)
            values = self._readers[index].read(name, place.row[chosen])
            if result is None:
                result = np.empty((len(place.row), values.shape[1]), dtype)
            result[chosen] = values
        assert result is not None
        return result


class TokenData:
    """A prepared data folder, opened for reading; made by `TokenData.open`.

    Attributes:
      folder: where it lies.
      manifest_sha256: names the data in a checkpoint.
      tokenizer_sha256: of the folder's tokenizer.json.
      sequence_length: S; a row has S+1 tokens.
      vocab_size: of the tokenizer; all ids are below it.
      sources: names; source_index counts them.
      splits: names of those that hold rows.

    Example:
      data = TokenData.open("data/stdlib_4096_256")
      for batch in data.train_batches(0, num_steps=100, global_batch=32):
        print(batch["tokens"].shape)  # (32, 257)
    """

    def __init__(self, folder: Path, read: manifest.Manifest) -> None:
        contents = read.contents
        self.folder, self._contents = folder, contents
        self.data_workers = 1
        self.manifest_sha256 = read.sha256
        self.tokenizer_sha256: str = contents["tokenizer"]["sha256"]
        self.sequence_length: int = contents["sequence_length"]
        self.vocab_size: int = contents["tokenizer"]["vocab_size"]
        self.end_of_text_id: int = contents["tokenizer"]["end_of_text_id"]
        self.sources: tuple[str, ...] = tuple(contents["sources"])
        self.splits: tuple[str, ...] = tuple(contents["splits"])
        self._open_splits = {
            name: _Split(
                folder,
                contents,
                split["shards"],
                contents["mixture"] if name == "train" else None,
            )
            for name, split in contents["splits"].items()
        }

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        *,
        vocab_size: int | None = None,
        data_workers: int = 1,
    ) -> "TokenData":
        """Opens a data folder after checking that it is whole.

        Args:
          folder: made by `tfbig prepare`.
          vocab_size: of the model that is to read it; None doesn't check.
          data_workers: threads that read training batches; more help where reading waits.

        Raises:
          UserError: no data folder, another format, a changed tokenizer, a missing or cut shard,
            or ids that the model has no embedding for.
        """
        folder = Path(folder)
        found = manifest.read(folder)
        check_tokenizer(folder, found.contents)
        check_shards(folder, found.contents)
        if vocab_size is not None:
            check_vocabulary(folder, found.contents, vocab_size)
        data = cls(folder, found)
        data.data_workers = data_workers
        return data

    def identity(self, consumed_samples: int) -> dict[str, str]:
        """Returns what names the data of a run that has consumed so many samples.

        Segments that begin later, and sources they add, leave it as it is.

        Args:
          consumed_samples: of the run.
        """
        return {
            "manifest_sha256": self.manifest_sha256,
            "tokenizer_sha256": self.tokenizer_sha256,
            "mixture_sha256": manifest.mixture_identity(self._contents, consumed_samples),
        }

    @property
    def contents(self) -> Mapping[str, Any]:
        """The folder's manifest."""
        return self._contents

    @property
    def tokenizer_path(self) -> Path:
        """The folder's tokenizer.json."""
        return self.folder / manifest.TOKENIZER

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer."""
        return Tokenizer.load(self.tokenizer_path)

    def num_rows(self, split: str) -> int:
        """Returns the samples of a split; 0 where the folder doesn't have it."""
        return self._open_splits[split].order.num_rows if split in self._open_splits else 0

    def num_bytes(self, split: str, source: str | None = None) -> int:
        """Returns the bytes of text that a split's unmasked labels stand for.

        End-of-text and other special tokens stand for none. Bits per byte is the split's summed
        loss, in bits, over this number.

        Args:
          split: of the folder.
          source: counts only this one; None means all.
        """
        if split not in self._open_splits:
            return 0
        described = self._contents["splits"][split]
        if source is None:
            return described["bytes"]
        return described["sources"].get(source, {"bytes": 0})["bytes"]

    def rows(self, split: str, positions: np.ndarray, seed: int) -> Batch:
        """Returns the samples at positions of a training stream, wherever they are stored.

        Args:
          split: of the folder.
          positions: (n,) int64, from 0 on without end: each epoch is another permutation.
          seed: of the run.

        Returns:
          tokens int32 (n, S+1), sample_index int64 (n,), source_index int32 (n,),
          loss_mask uint8 (n, S), and document_ids int32 (n, S+1) where the shards store them.
        """
        positions = np.asarray(positions, np.int64)
        place = self._open_splits[split].order.locate(positions, seed)
        return self._gather(split, place, positions)

    def rows_in_order(self, split: str, positions: np.ndarray) -> Batch:
        """Returns a split's rows by number, as `rows` does.

        Positions from the split's end on give rows of loss_mask 0: they fill up a last batch.

        Args:
          split: of the folder.
          positions: (n,) int64.
        """
        positions = np.asarray(positions, np.int64)
        order = self._open_splits[split].order
        place = order.locate_sequential(np.minimum(positions, order.num_rows - 1))
        batch = self._gather(split, place, positions)
        batch[LOSS_MASK][positions >= order.num_rows] = 0
        return batch

    def sources_in_order(self, split: str, positions: np.ndarray) -> np.ndarray:
        """Returns the source (n,) of a split's rows by number; behind its end, of the last row.

        Args:
          split: of the folder.
          positions: (n,) int64.
        """
        order = self._open_splits[split].order
        return order.locate_sequential(np.minimum(positions, order.num_rows - 1)).source

    def _gather(self, split: str, place: Place, positions: np.ndarray) -> Batch:
        opened, stored = self._open_splits[split], self._contents["features"]
        batch = {
            TOKENS: opened.read(TOKENS, place, np.int32),
            SAMPLE_INDEX: positions,
            SOURCE_INDEX: place.source,
            LOSS_MASK: opened.read(LOSS_MASK, place, np.uint8)
            if LOSS_MASK in stored
            else np.ones((len(positions), self.sequence_length), np.uint8),
        }
        if DOCUMENT_IDS in stored:
            batch[DOCUMENT_IDS] = opened.read(DOCUMENT_IDS, place, np.int32)
        return batch

    def train_batches(
        self,
        start_sample: int,
        num_steps: int,
        global_batch: int,
        data_rank: int = 0,
        data_size: int = 1,
        seed: int = 0,
        slice_rows: int = 0,
    ) -> Any:
        """Returns a tf.data.Dataset of this process's slices of the next global batches.

        Step k's global batch is the stream's samples [start_sample + k * global_batch, ...), of
        which rank r gets the r-th of data_size equal slices: the stream is the same for every
        world size, and starting later is resuming.

        Args:
          start_sample: samples that the run has consumed.
          num_steps: batches.
          global_batch: samples of all processes together.
          data_rank: which slice.
          data_size: number of slices.
          seed: of the run.
          slice_rows: rows of a slice where global_batch need not divide: those of the last slices
            that lie behind the global batch's end have loss_mask 0. 0 means an equal share.

        Raises:
          UserError: global_batch does not divide, or there is nothing to train on.
        """
        if not self.num_rows("train"):
            raise UserError(f"{self.folder} has no train split.")
        local = slice_rows or _local_batch(global_batch, data_size)
        assert local * data_size >= global_batch, f"{data_size} slices of {local} rows"
        is_filler = data_rank * local + np.arange(local) >= global_batch  # (local,)
        split = self._open_splits["train"]
        whole_blocks = data_size <= _FEW_PROCESSES
        ahead = PlacesAhead(
            split.order,
            seed,
            start_sample + data_rank * local,
            local,
            global_batch,
            lambda place: split.read_ahead(place, whole_blocks),
        )

        def read(first: int, count: int) -> Batch:
            batch = self._gather("train", *ahead.of_steps(first, count))
            if is_filler.any():
                batch[LOSS_MASK][np.tile(is_filler, count)] = 0
            return batch

        is_uneven = local * data_size > global_batch  # all ranks' batches are of one form
        return self._dataset(read, num_steps, local, self.data_workers, always_masked=is_uneven)

    def evaluation_batches(
        self, split: str, global_batch: int, data_rank: int = 0, data_size: int = 1
    ) -> Any:
        """Returns a tf.data.Dataset that goes through a split once, in order.

        Every process gets the same number of batches, all of one shape: the last one is filled up
        with rows of loss_mask 0.

        Args:
          split: of the folder; one that it doesn't have gives no batch.
          global_batch: samples of all processes together.
          data_rank: which slice of a global batch this process feeds.
          data_size: number of slices.

        Raises:
          UserError: global_batch does not divide.
        """
        local = _local_batch(global_batch, data_size)

        def read(first: int, count: int) -> Batch:
            starts = (first + np.arange(count, dtype=np.int64)) * global_batch + data_rank * local
            positions = (starts[:, None] + np.arange(local)).ravel()  # (count * local,)
            return self.rows_in_order(split, positions)

        num_steps = -(-self.num_rows(split) // global_batch)
        return self._dataset(read, num_steps, local, 1, always_masked=True)

    def _dataset(
        self,
        read: Callable[[int, int], Batch],
        num_steps: int,
        local: int,
        num_threads: int,
        always_masked: bool = False,
    ) -> Any:
        """Returns range -> gather -> prefetch; a mask of ones is one tensor for all batches."""
        import tensorflow as tf

        length, stored = self.sequence_length, self._contents["features"]
        signature = {
            TOKENS: (tf.int32, (local, length + 1)),
            SAMPLE_INDEX: (tf.int64, (local,)),
            SOURCE_INDEX: (tf.int32, (local,)),
        }
        constants = {}
        if always_masked or LOSS_MASK in stored:
            signature[LOSS_MASK] = (tf.uint8, (local, length))
        else:
            constants[LOSS_MASK] = tf.ones((local, length), tf.uint8)
        if DOCUMENT_IDS in stored:
            signature[DOCUMENT_IDS] = (tf.int32, (local, length + 1))
        together = batches_together(4 * (length + 1), local)
        return make_dataset(read, signature, constants, num_steps, together, num_threads)


def _local_batch(global_batch: int, data_size: int) -> int:
    if global_batch < 1 or global_batch % data_size:
        raise UserError(
            f"--global_batch={global_batch} does not divide among {data_size} replicas "
            f"({global_batch} = {data_size} x {global_batch // data_size} + "
            f"{global_batch % data_size})."
        )
    return global_batch // data_size
