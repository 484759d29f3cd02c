"""The tokenizer stage's output: documents as token ids, before any sequence length is chosen.

One store is a pair PREFIX.bin, PREFIX.idx in Megatron-LM's indexed format, one sequence a document
with its end-of-text, plus PREFIX.keys: a uint64 a document, by which it is shuffled.
"""

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tfbig.durable_file import fsync_directory

# Megatron-LM core/datasets/indexed_dataset.py: the header and its codes of dtypes.
_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_DTYPE_CODES: dict[np.dtype, int] = {np.dtype(np.int32): 4, np.dtype(np.uint16): 8}


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the smallest stored dtype that holds all ids of a vocabulary."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<i4")


class TokenStoreWriter:
    """Writes one store; its files appear under their names with `close`.

    Args:
      prefix: path without suffix; its directory exists.
      dtype: of the stored ids.
      end_of_text_id: appended to every document.
    """

    def __init__(self, prefix: Path, dtype: np.dtype, end_of_text_id: int) -> None:
        self._prefix, self._dtype, self._end_of_text_id = prefix, dtype, end_of_text_id
        self._lengths: list[int] = []
        self._keys: list[int] = []
        self._file = open(_temporary(prefix, "bin"), "wb")

    def add(self, tokens: np.ndarray, key: int) -> None:
        """Appends one document.

        Args:
          tokens: (n,) ids without end-of-text.
          key: uint64.
        """
        with_end = np.empty(len(tokens) + 1, self._dtype)
        with_end[:-1] = tokens
        with_end[-1] = self._end_of_text_id
        self._file.write(with_end.data)
        self._lengths.append(len(with_end))
        self._keys.append(key)

    def close(self) -> None:
        """Makes the store complete and durable."""
        lengths = np.array(self._lengths, "<i4")
        pointers = np.zeros(len(lengths), "<i8")
        np.cumsum(lengths[:-1], out=pointers[1:], dtype=np.int64)
        pointers *= self._dtype.itemsize
        index = b"".join(
            [
                _MAGIC,
                struct.pack("<QB", _VERSION, _DTYPE_CODES[self._dtype]),
                struct.pack("<QQ", len(lengths), len(lengths) + 1),
                lengths.tobytes(),
                pointers.tobytes(),
                np.arange(len(lengths) + 1, dtype="<i8").tobytes(),
            ]
        )
        _sync_and_close(self._file)
        for suffix, data in (("idx", index), ("keys", np.array(self._keys, "<u8").tobytes())):
            with open(_temporary(self._prefix, suffix), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        for suffix in ("bin", "keys", "idx"):  # the index last: with it the store is complete
            os.replace(_temporary(self._prefix, suffix), f"{self._prefix}.{suffix}")
        fsync_directory(self._prefix.parent)


class TokenStore:
    """Reads a store without holding its tokens in memory.

    Args:
      prefix: path without suffix.

    Attributes:
      keys: (num_documents,) uint64.
      num_tokens: of all documents, each one's end-of-text included.
    """

    def __init__(self, prefix: Path) -> None:
        index = Path(f"{prefix}.idx").read_bytes()
        header = struct.Struct("<9sQBQQ")
        magic, version, code, num_documents, _ = header.unpack_from(index)
        assert (magic, version) == (_MAGIC, _VERSION), f"{prefix}.idx is no token store"
        dtype = next(known for known, known_code in _DTYPE_CODES.items() if known_code == code)
        self._lengths = np.frombuffer(index, "<i4", num_documents, header.size)
        self._starts = np.cumsum(self._lengths, dtype=np.int64) - self._lengths
        self.keys = np.fromfile(f"{prefix}.keys", "<u8")
        num_tokens = self.num_tokens = int(self._lengths.sum(dtype=np.int64))
        self._tokens = (
            np.memmap(f"{prefix}.bin", dtype, "r", shape=(num_tokens,))
            if num_tokens
            else np.empty(0, dtype)
        )

    def documents(self, order: Sequence[int] | np.ndarray) -> Iterator[np.ndarray]:
        """Yields the documents with the given indices, without their end-of-text."""
        tokens = np.asarray(self._tokens)
        for index in order:
            start = self._starts[index]
            yield tokens[start : start + self._lengths[index] - 1]


def _temporary(prefix: Path, suffix: str) -> str:
    return f"{prefix}.{suffix}.tmp"


def _sync_and_close(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
