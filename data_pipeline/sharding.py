"""Token stores to shards: documents shuffled, packed and written, one source after the other."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline import manifest
from data_pipeline.order import hash_with_seed
from data_pipeline.packing import Packer
from data_pipeline.shards import TOKENS, RecordLayout, ShardInfo, ShardWriter
from data_pipeline.token_store import TokenStore
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.tokenizing import Tokenized


@dataclass
class SourceCounts:
    """What one source has in one split; field names are the manifest's."""

    documents: int = 0
    rows: int = 0
    tokens: int = 0  # labels in the rows
    bytes: int = 0  # of text that those labels stand for
    dropped_tokens: int = 0  # at the stream's end, fewer than fill a row


@dataclass
class SplitShards:
    """One split as it was written.

    Attributes:
      shards: in the order of their numbers, each of one source.
      sources: counts by name.
    """

    shards: list[ShardInfo] = field(default_factory=list)
    sources: dict[str, SourceCounts] = field(default_factory=dict)

    def total(self, name: str) -> int:
        """Returns the sum of one count over the sources."""
        return sum(getattr(counts, name) for counts in self.sources.values())

    def to_manifest(self) -> dict[str, Any]:
        """Returns the manifest's entry."""
        return {
            "rows": self.total("rows"),
            "bytes": self.total("bytes"),
            "sources": {source: asdict(counts) for source, counts in self.sources.items()},
            "shards": [shard._asdict() for shard in self.shards],
        }


def write_split(
    split: str,
    tokenized: Tokenized,
    folder: Path,
    tokenizer: Tokenizer,
    layout: RecordLayout,
    rows_per_shard: int,
    sequence_length: int,
    seed: int,
) -> SplitShards:
    """Packs the split's token stores into shards.

    Args:
      split: of those in `tokenized`.
      tokenized: the stores.
      folder: of the data.
      tokenizer: that made them.
      layout: of a record.
      rows_per_shard: at most.
      sequence_length: S.
      seed: of the shuffle of documents.
    """
    result = SplitShards()
    stores = {
        source: TokenStore(prefix)
        for (at, source), prefix in sorted(tokenized.stores.items())
        if at == split
    }
    for source, store in stores.items():
        result.sources[source] = SourceCounts(
            documents=tokenized.num_documents[split, source],
            rows=store.num_tokens // sequence_length,
        )
    num_shards = sum(-(-counts.rows // rows_per_shard) for counts in result.sources.values())
    for source, store in stores.items():
        counts = result.sources[source]
        order = np.argsort(hash_with_seed(seed, store.keys), kind="stable")
        packer = Packer(sequence_length, tokenizer.end_of_text_id, tokenizer.dtype)
        blocks = packer.rows(store.documents(order))
        for shard in _group_by_shard(blocks, rows_per_shard):
            name = manifest.shard_name(split, len(result.shards), num_shards)
            writer = ShardWriter(folder / name, layout)
            for rows in shard:
                counts.bytes += tokenizer.num_bytes(rows[:, 1:])
                writer.write({TOKENS: rows})
            result.shards.append(writer.close(source))
        counts.tokens = counts.rows * sequence_length
        counts.dropped_tokens = packer.num_tail_tokens
        assert packer.num_tokens == counts.tokens + counts.dropped_tokens == store.num_tokens
    assert len(result.shards) == num_shards
    return result


def _group_by_shard(
    blocks: Iterator[np.ndarray], rows_per_shard: int
) -> Iterator[Iterator[np.ndarray]]:
    """Regroups blocks of rows by shard; each group must be used up before the next is taken."""
    waiting = next(blocks, None)

    def one_shard() -> Iterator[np.ndarray]:
        nonlocal waiting
        room = rows_per_shard
        while waiting is not None and room:
            taken, waiting = waiting[:room], waiting[room:]
            room -= len(taken)
            yield taken
            if not len(waiting):
                waiting = next(blocks, None)

    while waiting is not None:
        yield one_shard()
