"""Equal and nearly equal documents: which of each group is kept."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from data_pipeline.plan import Plan
from data_pipeline.shuffling import PartStores
from data_pipeline.token_store import read_digests
from data_pipeline.tokenizing import PREFIX, STORE_FOLDER
from data_pipeline.work import FOLDER, Result, WorkFolder

_DIGEST_BYTES = 16
_PARTITION_DOCUMENTS = 1 << 23  # about half a gigabyte of memory
# Held-out documents stay and their copies leave the train split.
_PRIORITY = {"test": 0, "validation": 1, "train": 2}


@dataclass(frozen=True)
class DuplicateFinder:
    """Finds the documents that are dropped as copies of others.

    Equal documents are told by 128 bits of their hash, over all splits and sources; the held-out
    one stays, then the first of the first source by name. Equal ones are in the same range of
    hashes: each range is found apart, by whichever process claims it.

    Args:
      name: of the plan and its tokenizer, for items.
      parts: of the preparation, sorted.
      plan: of it.
      folder: of the data.
      work: its work folder.
    """

    name: str
    parts: list[PartStores]
    plan: Plan
    folder: Path
    work: WorkFolder

    def sizes(self) -> dict[str, int]:
        """Returns {item: bytes that it reads, about}: its progress ends there."""
        share = _DIGEST_BYTES * self._num_documents // max(1, len(self._equal_items))
        sizes = dict.fromkeys(self._equal_items, share)
        if self._near_items:
            from data_pipeline.near_duplicates import TOKEN_BYTES

            num_tokens = sum(stores.num_tokens for stores in self.parts)
            sizes |= dict.fromkeys(self._near_items, TOKEN_BYTES * num_tokens)
        return sizes

    def run(self) -> Result:
        """Finds what no other process finds; returns {"equal", "near"} dropped, of "documents"."""
        equal = self.work.run(self._equal_items, self._find_equal)
        near = self.work.run(self._near_items, self._find_near)
        return {
            "equal": sum(result["dropped"] for result in equal),
            "near": sum(result["dropped"] for result in near),
            "documents": self._num_documents,
        }

    def kept(self, stores: PartStores) -> np.ndarray:
        """Returns which documents of a part, (n,) bool in the order of chunks, are kept."""
        first = self._first_of_part[stores.part]
        kept = np.ones(stores.num_documents, bool)
        for item in [*self._equal_items, *self._near_items]:
            dropped = self._dropped(item)
            begin, end = np.searchsorted(dropped, [first, first + len(kept)])
            kept[dropped[begin:end] - first] = False
        return kept

    @cached_property
    def _ordered(self) -> list[PartStores]:
        return sorted(self.parts, key=lambda stores: (_PRIORITY[stores.part[0]], stores.part[1]))

    @cached_property
    def _first_of_part(self) -> dict[tuple[str, str], int]:
        """Number of each part's first document: those of parts of higher priority come before."""
        numbers, number = {}, 0
        for stores in self._ordered:
            numbers[stores.part] = number
            number += stores.num_documents
        return numbers

    @cached_property
    def _num_documents(self) -> int:
        return sum(stores.num_documents for stores in self.parts)

    @cached_property
    def _equal_items(self) -> list[str]:
        if not self.plan.config.remove_duplicates:
            return []
        count = max(1, -(-self._num_documents // _PARTITION_DOCUMENTS))
        return [f"duplicates-{self.name}-{number:05d}" for number in range(count)]

    @cached_property
    def _near_items(self) -> list[str]:
        return [f"duplicates-{self.name}-near"] if self.plan.config.near_duplicates else []

    def _find_equal(self, item: str) -> Result:
        number, count = self._equal_items.index(item), len(self._equal_items)
        bounds = number * 2**64 // count, (number + 1) * 2**64 // count - 1
        columns = [np.empty((3, 0), np.uint64)]
        for keys, checks, numbers in self._chunks():
            chosen = np.flatnonzero((keys >= bounds[0]) & (keys <= bounds[1]))
            columns.append(np.stack([keys[chosen], checks[chosen], numbers[chosen]]))
            self.work.progress += _DIGEST_BYTES * len(keys) // count
        found = np.concatenate(columns, axis=1)  # (3, n)
        del columns
        return self._drop(item, _all_but_first(*found))

    def _find_near(self, item: str) -> Result:
        from data_pipeline.near_duplicates import drop_near_duplicates

        kept = np.ones(self._num_documents, bool)
        for equal in self._equal_items:
            kept[self._dropped(equal)] = False
        before = kept.copy()
        threshold = self.plan.config.near_duplicates
        drop_near_duplicates(self._ordered, kept, threshold, self.folder, self.work)
        return self._drop(item, np.flatnonzero(before & ~kept))

    def _chunks(self) -> Iterator[tuple[np.ndarray, ...]]:
        """Yields, chunk by chunk, keys, checks and numbers (all uint64) of all documents."""
        pieces: dict[str, list[tuple[int, int, int]]] = {}
        for stores in self._ordered:
            number = self._first_of_part[stores.part]
            for item, first, count in stores.pieces:
                pieces.setdefault(item, []).append((first, count, number))
                number += count
        for item, places in pieces.items():
            keys, checks = read_digests(self.folder / STORE_FOLDER / item / PREFIX)
            numbers = np.empty(len(keys), np.uint64)
            for first, count, number in places:
                numbers[first : first + count] = np.arange(number, number + count)
            yield keys, checks, numbers

    def _drop(self, item: str, dropped: np.ndarray) -> Result:
        """Commits the numbers of documents that an item drops, ascending."""
        temporary = self.work.temporary(f"dropped-{item}")
        with open(temporary, "wb") as file:
            np.save(file, dropped.astype(np.int64))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path(item))
        return {"dropped": len(dropped)}

    def _dropped(self, item: str) -> np.ndarray:
        return np.load(self._path(item), mmap_mode="r")

    def _path(self, item: str) -> Path:
        return self.folder / FOLDER / f"dropped-{item}.npy"


def _all_but_first(keys: np.ndarray, checks: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Returns, ascending, the numbers of documents that equal one of a lower number."""
    # Few documents have a key that another has: only those are sorted by all three.
    order = np.argsort(keys)
    ascending = keys[order]
    same = ascending[1:] == ascending[:-1]
    shared = order[np.append(same, False) | np.append(False, same)] if len(order) else order
    keys, checks, numbers = keys[shared], checks[shared], numbers[shared]
    order = np.lexsort((numbers, checks, keys))
    keys, checks = keys[order], checks[order]
    is_copy = (keys[1:] == keys[:-1]) & (checks[1:] == checks[:-1])
    return np.sort(numbers[order][1:][is_copy])
