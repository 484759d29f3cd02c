"""Equal and nearly equal documents: which of each group is kept."""

from pathlib import Path

import numpy as np

from data_pipeline.plan import Plan
from data_pipeline.shuffling import PartStores, store_of
from data_pipeline.tokenizing import Part
from data_pipeline.work import FOLDER, Result, WorkFolder
from tfbig.config import PrepareConfig

_DIGEST_BYTES = 16
# Held-out documents stay and their copies leave the train split.
_PRIORITY = {"test": 0, "validation": 1, "train": 2}


def kept_path(folder: Path, part: Part) -> Path:
    """Returns where it is stored which documents of a part are kept."""
    import hashlib

    name = hashlib.blake2b("\0".join(part).encode(), digest_size=8).hexdigest()
    return folder / FOLDER / f"kept-{name}.npy"


def duplicates_bytes(parts: list[PartStores], config: PrepareConfig) -> int:
    """Returns what `mark_duplicates` reads: its progress ends there."""
    num_bytes = sum(_DIGEST_BYTES * stores.num_documents for stores in parts)
    if config.near_duplicates:
        from data_pipeline.near_duplicates import TOKEN_BYTES

        num_bytes += sum(TOKEN_BYTES * stores.num_tokens for stores in parts)
    return num_bytes


def mark_duplicates(parts: list[PartStores], plan: Plan, folder: Path, work: WorkFolder) -> Result:
    """Writes, part by part, which documents are kept.

    Equal documents are told by 128 bits of their hash, over all splits and sources; the held-out
    one stays, then the first of the first source by name. Memory: 48 bytes a document.

    Args:
      parts: of the preparation, sorted.
      plan: of it.
      folder: of the data.
      work: its work folder.
    """
    ordered = sorted(parts, key=lambda stores: (_PRIORITY[stores.part[0]], stores.part[1]))
    keys, checks = _digests(ordered, folder, work)
    kept = np.zeros(len(keys), bool)
    if plan.config.remove_duplicates:
        order = np.lexsort((checks, keys))  # stable: the first of each group has priority
        new = np.ones(len(order), bool)
        new[1:] = (keys[order][1:] != keys[order][:-1]) | (checks[order][1:] != checks[order][:-1])
        kept[order[new]] = True
    else:
        kept[:] = True
    num_equal = int(len(kept) - np.count_nonzero(kept))
    if plan.config.near_duplicates:
        from data_pipeline.near_duplicates import drop_near_duplicates

        drop_near_duplicates(ordered, kept, plan.config.near_duplicates, folder, work)
    at = 0
    for stores in ordered:
        temporary = work.temporary("kept")
        with open(temporary, "wb") as file:
            np.save(file, kept[at : at + stores.num_documents])
        temporary.replace(kept_path(folder, stores.part))
        at += stores.num_documents
    num_near = int(len(kept) - np.count_nonzero(kept)) - num_equal
    return {"equal": num_equal, "near": num_near, "documents": len(kept)}


def _digests(
    parts: list[PartStores], folder: Path, work: WorkFolder
) -> tuple[np.ndarray, np.ndarray]:
    keys, checks = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
    for stores in parts:
        for item, first, count in stores.pieces:
            store = store_of(folder, item)
            keys.append(store.keys[first : first + count])
            checks.append(store.checks[first : first + count])
            work.progress += _DIGEST_BYTES * count
    return np.concatenate(keys), np.concatenate(checks)
