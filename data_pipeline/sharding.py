"""Parts to shards: each shard's rows are read from the token stores, packed and written apart."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_pipeline.packing import Rows, document_ids, fitted_rows, joined_rows
from data_pipeline.shards import (
    DOCUMENT_IDS,
    LOSS_MASK,
    TOKENS,
    RecordLayout,
    ShardWriter,
)
from data_pipeline.shuffling import PartOrder, PartStores
from data_pipeline.stage_time import Clocks
from data_pipeline.token_store import IndexedTokens
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.tokenizing import PREFIX, STORE_FOLDER
from data_pipeline.work import FOLDER, Result, WorkFolder
from tfbig.config import PrepareConfig

_BLOCK_TOKENS = 1 << 22  # tokens that are packed and written at a time


class Shard(NamedTuple):
    """One shard to be written."""

    file: str
    source: str
    order: str  # the item that ordered its part
    stores: PartStores
    first_row: int
    last_row: int


class PartStream:
    """The stream of a part: its documents in shuffled order, each with its end-of-text.

    Args:
      order: of the part.
      stores: of the part.
      folder: of the data.
      end_of_text_id: stands before the stream.
    """

    def __init__(
        self, order: PartOrder, stores: PartStores, folder: Path, end_of_text_id: int
    ) -> None:
        self._order = order
        self._tokens = [
            IndexedTokens(folder / STORE_FOLDER / item / PREFIX).tokens
            for item, _, _ in stores.pieces
        ]
        self._end = end_of_text_id

    def labels(self, first: int, last: int) -> np.ndarray:
        """Returns tokens [first, last) of the stream; number -1 is the end-of-text before it."""
        ends = self._order.ends
        begin = int(np.searchsorted(ends, max(first, 0), side="right"))
        stop = int(np.searchsorted(ends, last, side="left")) + 1
        chosen = slice(begin, min(stop, len(ends)))
        of_ends = np.asarray(ends[chosen])
        before = int(ends[begin - 1]) if begin else 0
        lengths = np.diff(of_ends, prepend=before)
        starts = np.asarray(self._order.start[chosen]).copy()
        stops = starts + lengths
        if len(starts):
            starts[0] += max(first, 0) - before
            stops[-1] -= int(of_ends[-1]) - last
        chunks = self._order.chunk[chosen].tolist()
        pieces = [
            self._tokens[chunk][start:stop]
            for chunk, start, stop in zip(chunks, starts.tolist(), stops.tolist(), strict=True)
        ]
        if first < 0:
            pieces.insert(0, np.array([self._end], pieces[0].dtype))
        return np.concatenate(pieces)

    def document(self, document: int, first: int, last: int) -> np.ndarray:
        """Returns tokens [first, last) of one document."""
        start = int(self._order.start[document])
        return self._tokens[int(self._order.chunk[document])][start + first : start + last]

    def prompt_mask(self, first: int, last: int) -> np.ndarray:
        """Returns 0 for those of labels [first, last) that belong to prompts, else 1."""
        mask = np.ones(last - first, np.uint8)
        ends, prompts = self._order.ends, self._order.prompts
        assert prompts is not None
        begin = int(np.searchsorted(ends, first, side="right"))
        stop = min(int(np.searchsorted(ends, last, side="left")) + 1, len(ends))
        for document in range(begin, stop):
            start = (int(ends[document - 1]) if document else 0) - first
            mask[max(start, 0) : max(start + int(prompts[document]), 0)] = 0
        return mask


@dataclass(frozen=True)
class ShardMaker:
    """Does the items of the sharding stage.

    Args:
      shards: by item.
      config: the options.
      folder: of the data.
      work: its work folder.
      tokenizer: of the folder.
      layout: of a record.
    """

    shards: dict[str, Shard]
    config: PrepareConfig
    folder: Path
    work: WorkFolder
    tokenizer: Tokenizer
    layout: RecordLayout

    def __call__(self, item: str) -> Result:
        """Writes one shard and says what the manifest says of it."""
        shard, start = self.shards[item], Clocks.now()
        writer = ShardWriter(self.folder / shard.file, self.layout, self.work.temporary(item))
        names = {feature.name for feature in self.layout.features}
        num_tokens = num_bytes = 0
        for rows in self._rows(shard):
            features = {TOKENS: rows.tokens}
            if LOSS_MASK in names:
                features[LOSS_MASK] = rows.loss_mask
            if DOCUMENT_IDS in names:
                end = self.tokenizer.end_of_text_id
                features[DOCUMENT_IDS] = document_ids(rows.tokens, end)
            labels = rows.tokens[:, 1:]
            num_tokens += int(np.count_nonzero(rows.loss_mask))
            if LOSS_MASK in names:
                labels = labels[rows.loss_mask == 1]
            num_bytes += self.tokenizer.num_bytes(labels)
            writer.write(features)
            self.work.progress = writer.num_rows * self.layout.stride
        info = writer.close(shard.source)
        return {
            "shard": info._asdict(),
            "tokens": num_tokens,
            "text_bytes": num_bytes,
            "seconds": Clocks.now() - start,
        }

    def _rows(self, shard: Shard) -> Iterator[Rows]:
        order = PartOrder.read(self.folder / FOLDER / shard.order)
        stream = PartStream(order, shard.stores, self.folder, self.tokenizer.end_of_text_id)
        length = self.config.sequence_length
        block = max(1, _BLOCK_TOKENS // length)
        for first in range(shard.first_row, shard.last_row, block):
            last = min(first + block, shard.last_row)
            if order.segments is None:
                yield self._joined(stream, order, first, last)
            else:
                yield fitted_rows(
                    stream.document,
                    order.segments,
                    order.prompts,
                    first,
                    last,
                    length,
                    self.tokenizer.end_of_text_id,
                    self.tokenizer.dtype,
                )

    def _joined(self, stream: PartStream, order: PartOrder, first: int, last: int) -> Rows:
        length = self.config.sequence_length
        end = self.tokenizer.end_of_text_id
        rows = joined_rows(stream.labels, first, last, order.num_labels, length, end)
        if order.prompts is None:
            return rows
        stop = min(last * length, order.num_labels)
        mask = stream.prompt_mask(first * length, stop)
        padded = np.concatenate([mask, np.zeros((last - first) * length - len(mask), np.uint8)])
        return Rows(rows.tokens, rows.loss_mask * padded.reshape(rows.loss_mask.shape))  # (n, S)


def plan_shards(
    orders: dict[str, tuple[PartStores, Result]], rows_per_shard: int
) -> dict[str, Shard]:
    """Returns the shards of all parts by item.

    Args:
      orders: stores and result of each ordering item, sorted by split and source.
      rows_per_shard: at most.
    """
    from data_pipeline import manifest

    by_split: dict[str, list[tuple[str, PartStores, int, int]]] = {}
    for item, (stores, result) in orders.items():
        split, _ = stores.part
        for first in range(0, result["rows"], rows_per_shard):
            last = min(first + rows_per_shard, result["rows"])
            by_split.setdefault(split, []).append((item, stores, first, last))
    shards = {}
    for split, planned in by_split.items():
        for number, (item, stores, first, last) in enumerate(planned):
            name = manifest.shard_name(split, number, len(planned))
            source = stores.part[1]
            shards[f"shard-{split}-{number:05d}"] = Shard(name, source, item, stores, first, last)
    return shards
