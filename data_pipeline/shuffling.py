"""The global order of each part's documents, from the chunks' stores."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.packing import Segments, fit_documents, num_joined_rows
from data_pipeline.permutation import hash_with_seed
from data_pipeline.plan import Plan
from data_pipeline.stage_time import Clocks
from data_pipeline.token_store import TokenStore
from data_pipeline.tokenizing import PREFIX, STORE_FOLDER, Part
from data_pipeline.work import FOLDER, Result, WorkFolder, commit_folder

_DOCUMENT_BYTES = 28  # key, check, length and, of the index, a sequence's length


class PartStores:
    """Where the documents of one split and source lie.

    Args:
      part: split and source.
      results: of the tokenizing stage, by item, in the order of chunks.

    Attributes:
      pieces: (chunk's item, its first document, number of documents) of each chunk that has some.
      num_tokens: of all chunks.
    """

    def __init__(self, part: Part, results: dict[str, Result]) -> None:
        self.part = part
        self.pieces: list[tuple[str, int, int]] = []
        self.num_tokens = 0
        for item, result in results.items():
            for described in result["parts"]:
                if (described["split"], described["source"]) == part:
                    self.pieces.append((item, described["first"], described["documents"]))
                    self.num_tokens += described["tokens"]

    @property
    def num_documents(self) -> int:
        """Of all chunks."""
        return sum(count for _, _, count in self.pieces)


def order_bytes(stores: PartStores) -> int:
    """Returns what ordering a part reads: its progress ends there."""
    return _DOCUMENT_BYTES * stores.num_documents


def store_of(folder: Path, item: str) -> TokenStore:
    """Returns the store of a chunk."""
    return TokenStore(folder / STORE_FOLDER / item / PREFIX)


@dataclass(frozen=True)
class PartOrder:
    """Documents of a part in their order, mapped.

    Attributes:
      chunk: (n,) uint32, index into the part's pieces.
      start: (n,) int64, first token in that chunk's store.
      ends: (n,) int64, labels of the stream up to each document's end.
      prompts: (n,) int32 or None.
      segments: of fitted rows, or None where documents are joined.
    """

    chunk: np.ndarray
    start: np.ndarray
    ends: np.ndarray
    prompts: np.ndarray | None
    segments: Segments | None

    @property
    def num_labels(self) -> int:
        """Of the stream."""
        return int(self.ends[-1]) if len(self.ends) else 0

    @classmethod
    def read(cls, folder: Path) -> "PartOrder":
        """Returns what `order_part` wrote."""

        def column(name: str) -> np.ndarray | None:
            path = folder / f"{name}.npy"
            return np.load(path, mmap_mode="r") if path.exists() else None

        chunk, start, ends = column("chunk"), column("start"), column("ends")
        assert chunk is not None and start is not None and ends is not None
        segments = None
        if (folder / "row_starts.npy").exists():
            segments = Segments(*(np.load(folder / f"{n}.npy", "r") for n in _segment_files()))
        return cls(chunk, start, ends, column("prompts"), segments)


def _segment_files() -> list[str]:
    names = {"start": "segment_start", "size": "segment_size", "offset": "segment_offset"}
    return [names.get(name, name) for name in Segments._fields]


def order_part(
    stores: PartStores,
    item: str,
    plan: Plan,
    folder: Path,
    work: WorkFolder,
    kept: np.ndarray | None = None,
) -> Result:
    """Sorts the documents of a part by their places in the shuffle and decides on its rows.

    Documents of equal text come in the order they were read in.

    Args:
      stores: of the part.
      item: of the work.
      plan: of the preparation.
      folder: of the data.
      work: its work folder.
      kept: (n,) bool, which documents the removal of duplicates left, in the order of chunks.

    Returns:
      {"documents", "duplicates", "removed", "labels", "dropped", "rows"} of the part.
    """
    config, began = plan.config, Clocks.now()
    keys, checks, lengths, starts, prompts = _columns(stores, folder, work)
    chunk = np.repeat(
        np.arange(len(stores.pieces), dtype=np.uint32), [count for _, _, count in stores.pieces]
    )
    places = hash_with_seed(config.seed, keys)
    order = np.lexsort((checks, places))  # stable
    same = (keys[order][1:] == keys[order][:-1]) & (checks[order][1:] == checks[order][:-1])
    num_duplicates = int(np.count_nonzero(same))
    if kept is not None:
        order = order[kept[order]]
    lengths = lengths[order]
    ends = np.cumsum(lengths, dtype=np.int64)
    columns: dict[str, Any] = {"chunk": chunk[order], "start": starts[order], "ends": ends}
    if prompts is not None:
        columns["prompts"] = prompts[order]
    num_labels = int(ends[-1]) if len(ends) else 0
    if config.packing == "join":
        num_rows = num_joined_rows(num_labels, config.sequence_length, config.tail == "pad")
    else:
        segments = fit_documents(lengths, config.sequence_length, config.packing == "best_fit")
        columns |= dict(zip(_segment_files(), segments, strict=True))
        num_rows = segments.num_rows
    _commit(columns, item, folder, work)
    return {
        "documents": len(order),
        "duplicates": num_duplicates,
        "removed": stores.num_documents - len(order),
        "labels": num_labels,
        "dropped": max(0, num_labels - num_rows * config.sequence_length)
        if config.packing == "join"
        else 0,
        "rows": num_rows,
        "seconds": Clocks.now() - began,
    }


def _commit(columns: dict[str, Any], item: str, folder: Path, work: WorkFolder) -> None:
    temporary = work.temporary(item)
    temporary.mkdir(exist_ok=True)
    for name, values in columns.items():
        with open(temporary / f"{name}.npy", "wb") as file:
            np.save(file, values)
            file.flush()
            os.fsync(file.fileno())
    commit_folder(temporary, folder / FOLDER / item)


def _columns(stores: PartStores, folder: Path, work: WorkFolder) -> tuple[Any, ...]:
    """Returns keys, checks, lengths, starts and prompts of a part, chunk after chunk."""
    found: list[tuple[np.ndarray, ...]] = []
    has_prompts = False
    for item, first, count in stores.pieces:
        store, chosen = store_of(folder, item), slice(first, first + count)
        has_prompts = store.prompts is not None
        prompts = store.prompts[chosen] if store.prompts is not None else np.empty(0, np.int32)
        columns = store.keys, store.checks, store.lengths, store.starts
        found.append((*(values[chosen] for values in columns), prompts))
        work.progress += _DOCUMENT_BYTES * count
    keys, checks, lengths, starts, prompts = (
        np.concatenate(parts) for parts in zip(*found, strict=True)
    )
    return keys, checks, lengths, starts, prompts if has_prompts else None
