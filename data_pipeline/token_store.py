"""The tokenizer stage's output: documents as token ids, before any sequence length is chosen.

One store is a pair PREFIX.bin, PREFIX.idx in Megatron-LM's indexed format, one sequence a document
with its end-of-text, plus PREFIX.keys and PREFIX.checks, the halves of each document's digest: its
key places it in the shuffle. PREFIX.prompts, where it exists, counts each document's leading tokens
that are read but not learned.
"""

import os
import struct
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import chain, repeat
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tfbig.errors import UserError

# Megatron-LM core/datasets/indexed_dataset.py: the header and its codes of dtypes.
_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_DTYPES: dict[int, np.dtype] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
_HEADER = struct.Struct("<9sQBQQ")
_BLOCK_TOKENS = 1 << 22  # that are written at a time


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the smallest stored dtype that holds all ids of a vocabulary."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<i4")


def write_index(path: Path | str, lengths: np.ndarray, dtype: np.dtype) -> None:
    """Writes a Megatron .idx: every sequence is a document.

    Args:
      path: of the index.
      lengths: (n,) tokens of each document.
      dtype: of the tokens.
    """
    if len(lengths) and lengths.max() >= 1 << 31:
        raise UserError(
            f"a document has {lengths.max():,} tokens; the index of a token store holds lengths "
            "below 2^31: cut it, or leave it out with --max_characters."
        )
    lengths = lengths.astype("<i4")
    pointers = np.zeros(len(lengths), "<i8")
    np.cumsum(lengths[:-1], out=pointers[1:], dtype=np.int64)
    code = next(code for code, known in _DTYPES.items() if known == dtype)
    with open(path, "wb") as file:
        file.write(_HEADER.pack(_MAGIC, _VERSION, code, len(lengths), len(lengths) + 1))
        file.write(lengths.tobytes())
        file.write((pointers * dtype.itemsize).tobytes())
        file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
        _sync(file)


class IndexedTokens:
    """A Megatron .bin/.idx pair, mapped.

    Args:
      prefix: path without suffix.

    Attributes:
      dtype: of the ids.
      num_documents: of the file; a document may be several sequences.
      ends: (num_documents,) int64, the tokens up to each document's end.
      tokens: all ids.

    Raises:
      UserError: one of the files is missing, cut short, or not of that format.
    """

    def __init__(self, prefix: Path | str) -> None:
        try:
            index = Path(f"{prefix}.idx").read_bytes()
            num_bytes = os.path.getsize(f"{prefix}.bin")
        except OSError as error:
            raise UserError(f"cannot read {prefix}.idx and .bin: {error.strerror}.") from None
        magic, version, code, num_sequences, num_bounds = (
            _HEADER.unpack_from(index) if len(index) >= _HEADER.size else (b"", 0, 0, 0, 0)
        )
        if (magic, version) != (_MAGIC, _VERSION) or code not in _DTYPES:
            raise UserError(f"{prefix}.idx is no index of Megatron's format, version {_VERSION}.")
        expected = _HEADER.size + 12 * num_sequences + 8 * num_bounds
        if len(index) < expected:
            raise UserError(f"{prefix}.idx is cut short: {len(index)} bytes of {expected}.")
        self.dtype = _DTYPES[code]
        lengths = np.frombuffer(index, "<i4", num_sequences, _HEADER.size)
        bounds = np.frombuffer(index, "<i8", num_bounds, _HEADER.size + 12 * num_sequences)
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        self.ends = ends[bounds[1:]]
        self.num_documents = len(self.ends)
        num_tokens = int(ends[-1])
        if num_bytes != num_tokens * self.dtype.itemsize:
            raise UserError(
                f"{prefix}.bin has {num_bytes} bytes, its index says {num_tokens} tokens x "
                f"{self.dtype.itemsize}: it is cut or changed."
            )
        self.tokens = (
            np.asarray(np.memmap(f"{prefix}.bin", self.dtype, "r"))
            if num_bytes
            else np.empty(0, self.dtype)
        )


class TokenStore(IndexedTokens):
    """A store of ours, read without holding its tokens in memory.

    Attributes:
      keys: (num_documents,) uint64.
      checks: (num_documents,) uint64.
      lengths: (num_documents,) tokens, end-of-text included.
      starts: (num_documents,) index of each document's first token.
      prompts: (num_documents,) leading tokens that are not learned, or None.
    """

    def __init__(self, prefix: Path | str) -> None:
        super().__init__(prefix)
        self.starts = np.concatenate([np.zeros(1, np.int64), self.ends[:-1]])[: len(self.ends)]
        self.lengths = self.ends - self.starts
        self.keys, self.checks = read_digests(prefix)
        prompts = Path(f"{prefix}.prompts")
        self.prompts = np.fromfile(prompts, "<i4") if prompts.exists() else None

    def sha256(self) -> str:
        """Returns the digest of the .bin, which is read for it."""
        return sha256(self.tokens.data if len(self.tokens) else b"").hexdigest()

    def find_problem(self, vocab_size: int, end_of_text_id: int) -> str:
        """Returns what is wrong with documents' bounds, columns or ids; "" where nothing is."""
        columns = [self.keys, self.checks, *([] if self.prompts is None else [self.prompts])]
        if any(len(column) != self.num_documents for column in columns):
            return f"does not have a key, a check (and a prompt) for each of {self.num_documents:,}"
        if not len(self.tokens):
            return ""
        if int(self.tokens.min()) < 0 or int(self.tokens.max()) >= vocab_size:
            return (
                f"has ids from {self.tokens.min()} to {self.tokens.max()}; the vocabulary has "
                f"{vocab_size}"
            )
        if not (self.tokens[self.ends - 1] == end_of_text_id).all():
            return "has documents that do not end with end-of-text"
        return ""

    @property
    def num_tokens(self) -> int:
        """Of all documents, each one's end-of-text included."""
        return len(self.tokens)


def read_digests(prefix: Path | str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the keys and the checks of a store, (num_documents,) uint64 each."""
    return np.fromfile(f"{prefix}.keys", "<u8"), np.fromfile(f"{prefix}.checks", "<u8")


def write_store(
    prefix: Path | str,
    documents: Sequence[np.ndarray],
    end_of_text_id: int,
    digests: np.ndarray,
    dtype: np.dtype,
    prompts: np.ndarray | None = None,
) -> str:
    """Writes one store; durable, not yet under its final name.

    Args:
      prefix: path without suffix; its directory exists.
      documents: ids of each, without end-of-text.
      end_of_text_id: is written behind each.
      digests: (n, 2) uint64, key and check of each.
      dtype: of the stored ids.
      prompts: (n,) or None.

    Returns:
      The sha256 of the .bin.
    """
    lengths = np.fromiter(map(len, documents), np.int64, len(documents)) + 1
    end, digest = np.array([end_of_text_id], dtype), sha256()
    with open(f"{prefix}.bin", "wb") as file:
        for first, last in _blocks(lengths):
            pieces = chain.from_iterable(zip(documents[first:last], repeat(end), strict=False))
            data = np.concatenate(list(pieces)).astype(dtype, copy=False).data
            file.write(data)
            digest.update(data)
        _sync(file)
    columns = {"keys": digests[:, 0].astype("<u8"), "checks": digests[:, 1].astype("<u8")}
    if prompts is not None:
        columns["prompts"] = prompts.astype("<i4")
    for suffix, values in columns.items():
        assert len(values) == len(lengths)
        with open(f"{prefix}.{suffix}", "wb") as file:
            file.write(values.tobytes())
            _sync(file)
    write_index(f"{prefix}.idx", lengths, dtype)
    return digest.hexdigest()


def _blocks(lengths: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yields ranges of documents of so many tokens that few writes are made."""
    ends = np.cumsum(lengths)
    first = 0
    while first < len(lengths):
        before = ends[first - 1] if first else 0
        last = int(np.searchsorted(ends, before + _BLOCK_TOKENS)) + 1
        yield first, last
        first = last


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
