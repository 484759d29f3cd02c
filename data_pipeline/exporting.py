"""A data folder's documents as Megatron-LM's .bin/.idx."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline import manifest
from data_pipeline.dataset import TokenData
from data_pipeline.shards import LOSS_MASK, TOKENS
from data_pipeline.token_store import TokenStore, write_index
from data_pipeline.tokenizing import PREFIX
from tfbig.durable_file import fsync_directory
from tfbig.errors import UserError

_BLOCK_ROWS = 4096


def export_megatron(folder: Path, prefix: Path, split: str) -> tuple[int, int]:
    """Writes PREFIX.bin and PREFIX.idx: one sequence a document, end-of-text last.

    Kept token stores hold every document whole; without them the joined rows of the shards are
    read, whose last document may be cut.

    Args:
      folder: of the data.
      prefix: path without suffix.
      split: of the folder.

    Returns:
      Documents and tokens written.

    Raises:
      UserError: the folder has no such split, or nothing to export it from.
    """
    contents = manifest.read(folder).contents
    if split not in contents["splits"]:
        raise UserError(f"{folder} has no {split} split.")
    if contents["token_store"]:
        documents = _stored_documents(folder, contents, split)
    elif contents["packing"]["policy"] == "join":
        documents = _joined_documents(TokenData.open(folder), split)
    else:
        raise UserError(
            f"{folder} kept no token store and its rows are not joined: prepare it with "
            "--keep_tokens."
        )
    dtype = np.dtype(contents["dtype"]).newbyteorder("<")
    lengths = []
    prefix.parent.mkdir(parents=True, exist_ok=True)
    names = {suffix: Path(f"{prefix}.{suffix}") for suffix in ("bin", "idx")}
    temporary = {suffix: path.with_name(f"{path.name}.tmp") for suffix, path in names.items()}
    with open(temporary["bin"], "wb") as file:
        for document in documents:
            lengths.append(len(document))
            file.write(np.ascontiguousarray(document, dtype).data)
        file.flush()
        os.fsync(file.fileno())
    write_index(temporary["idx"], np.array(lengths, np.int64), dtype)
    for suffix in ("bin", "idx"):
        os.replace(temporary[suffix], names[suffix])
    fsync_directory(prefix.parent)
    return len(lengths), sum(lengths)


def _stored_documents(folder: Path, contents: dict[str, Any], split: str) -> Iterator[np.ndarray]:
    for described in contents["stores"]:
        place = folder / contents["token_store"] / described["folder"]
        store = TokenStore(place / PREFIX)
        if store.sha256() != described["sha256"]:
            raise UserError(f"{place} is damaged: its sha256 is not the manifest's.")
        for part in described["parts"]:
            if part["split"] == split:
                for index in range(part["first"], part["first"] + part["documents"]):
                    yield store.tokens[store.starts[index] : store.ends[index]]


def _joined_documents(data: TokenData, split: str) -> Iterator[np.ndarray]:
    """Yields documents from rows: each source's rows are one stream, cut every S tokens.

    Prompts are of it though no loss counts them; what fills up a source's last row is not.
    """
    carried: dict[int, list[np.ndarray]] = {}
    of_sources = data.contents["splits"][split]["sources"]
    left = {name: counts["rows"] for name, counts in of_sources.items()}
    is_padded = data.contents["packing"]["tail"] == "pad"
    for first in range(0, data.num_rows(split), _BLOCK_ROWS):
        rows = np.arange(first, min(first + _BLOCK_ROWS, data.num_rows(split)))
        batch = data.rows_in_order(split, rows)
        for source in np.unique(batch["source_index"]):
            chosen = batch["source_index"] == source
            labels = batch[TOKENS][chosen][:, 1:].ravel()
            name = data.sources[int(source)]
            left[name] -= int(np.count_nonzero(chosen))
            if is_padded and not left[name]:  # its last label ends a document, which is learned
                learned = np.flatnonzero(batch[LOSS_MASK][chosen].ravel())
                labels = labels[: learned[-1] + 1]
            ends = np.flatnonzero(labels == data.end_of_text_id) + 1
            *whole, rest = np.split(labels, ends)
            for document in whole:
                yield np.concatenate([*carried.pop(int(source), []), document])
            if len(rest):
                carried.setdefault(int(source), []).append(rest)
    for source in sorted(carried):
        yield np.concatenate([*carried[source], np.array([data.end_of_text_id])])
