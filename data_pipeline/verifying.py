"""A data folder checked: every checksum, every id, and what the manifest says of both."""

from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from data_pipeline.dataset import TokenData
from data_pipeline.shards import LOSS_MASK, TOKENS, ShardReader
from data_pipeline.token_store import TokenStore
from data_pipeline.tokenizing import PREFIX
from tfbig.errors import UserError

_BLOCK_ROWS = 512  # about a megabyte, which a core's cache holds while it is gone through


def find_problems(folder: Path, say: Callable[[str], None]) -> Iterator[str]:
    """Yields a line for each thing that is wrong with a folder; reads all of it.

    Args:
      folder: of the data.
      say: is handed a line a shard and a line a kept token store.

    Raises:
      UserError: it is no data folder, or lacks a shard: then there is nothing to go through.
    """
    data = TokenData.open(folder)
    contents = data.contents
    for split, described in contents["splits"].items():
        num_bytes = 0
        for shard in described["shards"]:
            path = folder / shard["file"]
            say(f"  {shard['file']}: {shard['rows']:,} rows")
            reader = ShardReader(path, contents["features"], contents["stride"], shard["rows"])
            found = sha256()
            largest = -1
            for first in range(0, shard["rows"], _BLOCK_ROWS):
                last = min(first + _BLOCK_ROWS, shard["rows"])
                rows = slice(first, last)
                found.update(reader.stored(first, last))
                tokens = reader.read(TOKENS, rows)
                largest = max(largest, int(tokens.max()))
                if int(tokens.min()) < 0 or largest >= data.vocab_size:
                    yield (
                        f"{path}: rows {first} to {last - 1} have ids from {tokens.min()} to "
                        f"{tokens.max()}; the vocabulary has {data.vocab_size}"
                    )
                    break
                labels = tokens[:, 1:]
                if LOSS_MASK in contents["features"]:
                    labels = labels[reader.read(LOSS_MASK, rows) == 1]
                num_bytes += data.tokenizer.num_bytes(labels)
            else:
                yield from _shard_problems(path, shard, reader, found.hexdigest(), largest)
        if num_bytes != described["bytes"]:
            yield (
                f"{folder}: the {split} split stands for {num_bytes:,} bytes of text, its manifest "
                f"says {described['bytes']:,}"
            )
    for described in contents["stores"]:
        place = folder / contents["token_store"] / described["folder"]
        num_documents = sum(part["documents"] for part in described["parts"])
        say(f"  {place.relative_to(folder)}: {num_documents:,} documents")
        yield from _store_problems(place, described, data)


def _store_problems(place: Path, described: dict[str, Any], data: TokenData) -> Iterator[str]:
    """Yields what is wrong with a kept token store, which another preparation may be made of."""
    try:
        store = TokenStore(place / PREFIX)
    except (UserError, OSError) as error:
        yield f"{place} cannot be read: {error}"
        return
    if store.sha256() != described["sha256"]:
        yield f"{place} is damaged; its sha256 is not the manifest's"
    elif problem := store.find_problem(data.vocab_size, data.end_of_text_id):
        yield f"{place} {problem}"
    num_documents = sum(part["documents"] for part in described["parts"])
    if store.num_documents != num_documents:
        yield (
            f"{place} has {store.num_documents:,} documents, its manifest says {num_documents:,}"
        )


def _shard_problems(
    path: Path, shard: dict[str, Any], reader: ShardReader, digest: str, largest: int
) -> Iterator[str]:
    if digest != shard["sha256"]:
        row = reader.find_damage()
        where = f": the first damaged row is {row}" if row >= 0 else ""
        yield f"{path} is damaged{where}; its sha256 is not the manifest's"
    elif (row := reader.find_damage()) >= 0:
        yield f"{path}: the checksum of row {row} is wrong"
    if largest != shard["max_id"]:
        yield f"{path}: its largest id is {largest}, its manifest says {shard['max_id']}"
