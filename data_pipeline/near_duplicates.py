"""Nearly equal documents by MinHash over their tokens; needs the extra `dedup` (rensa)."""

from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.permutation import mix_bits
from data_pipeline.shuffling import PartStores, store_of
from data_pipeline.work import WorkFolder
from tfbig.errors import UserError

TOKEN_BYTES = 2  # of progress, for each token that is read
_SHINGLE_TOKENS = 5  # neighbouring tokens that make one element of a document's set
_PERMUTATIONS = 128
_SEED = 1
_BATCH_TOKENS = 1 << 20


def rensa() -> Any:
    """Returns the library that computes signatures.

    Raises:
      UserError: it is not installed.
    """
    try:
        import rensa as library
    except ImportError:
        raise UserError(
            "--near_duplicates needs rensa: python -m pip install 'tfbig[dedup]'"
        ) from None
    return library


def drop_near_duplicates(
    parts: list[PartStores],
    kept: np.ndarray,
    threshold: float,
    folder: Path,
    work: WorkFolder,
) -> None:
    """Clears the entries of `kept` of documents that are much like an earlier kept one.

    Two documents are compared where one of their bands of signatures agrees; the share of equal
    signatures estimates the Jaccard similarity of their sets of five neighbouring tokens.

    Args:
      parts: in order of priority.
      kept: (n,) bool, over the documents of all parts; is changed.
      threshold: similarity from which the later one is dropped.
      folder: of the data.
      work: its work folder.

    Source: Broder, "On the resemblance and containment of documents", 1997; Leskovec, Rajaraman,
    Ullman, "Mining of massive datasets", chapter 3 (bands).
    """
    signatures = _signatures(parts, folder, work)  # (n, 128)
    rows = _rows_of_band(threshold)
    pairs = [np.empty((0, 2), np.int64)]
    candidates = np.flatnonzero(kept)
    for first in range(0, _PERMUTATIONS - rows + 1, rows):
        band = signatures[candidates, first : first + rows].astype(np.uint64)
        hashes = np.zeros(len(candidates), np.uint64)
        for column in range(rows):
            hashes = mix_bits(hashes ^ band[:, column])
        order = np.argsort(hashes, kind="stable")
        same = hashes[order][1:] == hashes[order][:-1]
        starts = np.maximum.accumulate(
            np.where(np.concatenate([[True], ~same]), np.arange(len(order)), 0)
        )
        later = np.flatnonzero(np.concatenate([[False], same]))
        # Each is compared with its neighbour and with the first of its group.
        for earlier in (later - 1, starts[later]):
            found = np.stack([candidates[order[earlier]], candidates[order[later]]], axis=1)
            pairs.append(found)
    unique = np.unique(np.sort(np.concatenate(pairs), axis=1), axis=0)  # (pairs, 2)
    for begin in range(0, len(unique), 1 << 16):
        block = unique[begin : begin + (1 << 16)]
        equal = (signatures[block[:, 0]] == signatures[block[:, 1]]).mean(axis=1)
        for earlier, later in block[equal >= threshold].tolist():
            if kept[earlier]:
                kept[later] = False


def _rows_of_band(threshold: float) -> int:
    """Returns the longest bands that still find nearly all pairs of the threshold's similarity."""
    for rows in (16, 12, 8, 6, 4, 3, 2):
        if 1 - (1 - threshold**rows) ** (_PERMUTATIONS // rows) >= 0.98:
            return rows
    return 1


def _signatures(parts: list[PartStores], folder: Path, work: WorkFolder) -> np.ndarray:
    """Returns (n, 128) uint32, over the documents of all parts in their order."""
    blocks = [np.empty((0, _PERMUTATIONS), np.uint32)]
    for stores in parts:
        for item, first, count in stores.pieces:
            store = store_of(folder, item)
            while count:
                limit = store.starts[first] + _BATCH_TOKENS
                last = int(np.searchsorted(store.ends[first : first + count], limit)) + first
                last = max(last, first + 1)
                blocks.append(_batch_signatures(store, first, last))
                work.progress += TOKEN_BYTES * int(store.ends[last - 1] - store.starts[first])
                count -= last - first
                first = last
    return np.concatenate(blocks)


def _batch_signatures(store: Any, first: int, last: int) -> np.ndarray:
    begin, end = int(store.starts[first]), int(store.ends[last - 1])
    tokens = store.tokens[begin:end].astype(np.uint64)
    hashes = np.zeros(max(0, len(tokens) - _SHINGLE_TOKENS + 1), np.uint64)
    for place in range(_SHINGLE_TOKENS):
        hashes = mix_bits(hashes ^ tokens[place : place + len(hashes)])
    offsets, flat = [0], []
    for start, stop in zip(store.starts[first:last], store.ends[first:last], strict=True):
        own = hashes[start - begin : max(start - begin, stop - begin - _SHINGLE_TOKENS + 1)]
        if not len(own):  # shorter than a shingle: all that is there counts as one
            own = np.zeros(1, np.uint64)
            for token in tokens[start - begin : stop - begin]:
                own = mix_bits(own ^ token)
        flat.append(own)
        offsets.append(offsets[-1] + len(own))
    matrix = rensa().RMinHash.digest_matrix_from_flat_token_hashes(
        np.concatenate(flat), np.array(offsets, np.uint64), num_perm=_PERMUTATIONS, seed=_SEED
    )
    return np.array(matrix.to_rows(), np.uint32)
