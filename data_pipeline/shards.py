"""Shards: TFRecord files whose records all have one size, so that any row is found at once.

Each record is one tf.train.Example of fixed-size bytes features. TFRecordDataset and TFDS read
such a file as any other; here it is a (rows, stride) array of bytes.
"""

import mmap
import os
import struct
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import numpy as np

from data_pipeline.mapped_file import advise_needed, advise_random
from tfbig.durable_file import fsync_directory

TOKENS, LOSS_MASK, DOCUMENT_IDS = "tokens", "loss_mask", "document_ids"
_LENGTH_BYTES, _CRC_BYTES = 8, 4
_CHECKED_ROWS = 512  # whose checksums are compared at a time


class Feature(NamedTuple):
    """One array of a record."""

    name: str
    dtype: str  # numpy's, little-endian
    length: int  # elements


class RecordLayout:
    """Where the features of a record lie.

    Args:
      features: in their order in the record.

    Attributes:
      features: the same.
      stride: bytes of one record, TFRecord's framing included.
      offsets: {feature: its first byte, from the record's start}.
      template: (stride,) uint8, a record with zeros in place of features and payload checksum.
    """

    def __init__(self, features: tuple[Feature, ...]) -> None:
        self.features = features
        message, offsets = _encode_example(features)
        length = struct.pack("<Q", len(message))
        checksum = masked_crc32c([length]).tobytes()
        record = length + checksum + message + bytes(_CRC_BYTES)
        self.template = np.frombuffer(record, np.uint8)
        self.stride = len(record)
        self.offsets = {
            name: _LENGTH_BYTES + _CRC_BYTES + offset for name, offset in offsets.items()
        }

    def to_manifest(self) -> dict[str, dict[str, Any]]:
        """Returns {feature: dtype, length, offset} for the manifest."""
        return {
            feature.name: {
                "dtype": feature.dtype,
                "length": feature.length,
                "offset": self.offsets[feature.name],
            }
            for feature in self.features
        }


def row_features(
    sequence_length: int, dtype: np.dtype, loss_mask: bool = False, document_ids: bool = False
) -> tuple[Feature, ...]:
    """Returns the features of a row: S+1 tokens and, where asked for, mask and document ids."""
    features = [Feature(TOKENS, np.dtype(dtype).newbyteorder("<").str, sequence_length + 1)]
    if loss_mask:
        features.append(Feature(LOSS_MASK, "|u1", sequence_length))
    if document_ids:
        fits = sequence_length < 1 << 16
        features.append(Feature(DOCUMENT_IDS, "<u2" if fits else "<i4", sequence_length + 1))
    return tuple(features)


def masked_crc32c(parts: list[bytes]) -> np.ndarray:
    """Returns TFRecord's masked checksum of each part, (n,) uint32.

    Source: tensorflow/core/lib/hash/crc32c.h (Mask).
    """
    crc = np.array([google_crc32c.value(part) for part in parts], "<u4")
    return ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(0xA282EAD8)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _field(number: int, contents: bytes) -> bytes:
    """Returns a length-delimited protocol buffer field."""
    return _varint(number << 3 | 2) + _varint(len(contents)) + contents


def _encode_example(features: tuple[Feature, ...]) -> tuple[bytes, dict[str, int]]:
    """Returns a tf.train.Example with zeros for values, and where each feature's values begin.

    Example{features: 1} > Features{feature: 1, a map} > {key: 1, value: 2} > Feature{bytes_list: 1}
    > BytesList{value: 1}; source: tensorflow/core/example/{example,feature}.proto.
    """
    entries = []
    for feature in features:
        values = bytes(np.dtype(feature.dtype).itemsize * feature.length)
        value = _field(1, _field(1, values))
        entries.append(_field(1, _field(1, feature.name.encode()) + _field(2, value)))
    body = b"".join(entries)
    message = _field(1, body)
    offsets, end = {}, len(message) - len(body)
    for feature, entry in zip(features, entries, strict=True):
        end += len(entry)  # a feature's values are the last thing of its entry
        offsets[feature.name] = end - np.dtype(feature.dtype).itemsize * feature.length
    return message, offsets


class ShardInfo(NamedTuple):
    """What the manifest says of a shard."""

    file: str
    source: str
    rows: int
    max_id: int
    bytes: int
    sha256: str


class ShardWriter:
    """Writes one shard under a temporary name; `close` makes it durable and renames it.

    Args:
      path: of the finished shard.
      layout: of its records.
      temporary: where it is written; None means beside `path`.
    """

    def __init__(self, path: Path, layout: RecordLayout, temporary: Path | None = None) -> None:
        self._path, self._layout = path, layout
        self._temporary = temporary or path.with_name(path.name + ".tmp")
        self._file = open(self._temporary, "wb")
        self._hash = sha256()
        self.num_rows, self.max_id = 0, -1

    def write(self, features: Mapping[str, np.ndarray]) -> None:
        """Appends rows.

        Args:
          features: {name: (n, length)} of every feature of the layout.
        """
        layout, num_rows = self._layout, len(features[TOKENS])
        if not num_rows:
            return
        records = np.empty((num_rows, layout.stride), np.uint8)
        records[:] = layout.template
        for feature in layout.features:
            values, offset = features[feature.name], layout.offsets[feature.name]
            assert values.shape == (num_rows, feature.length)
            end = offset + np.dtype(feature.dtype).itemsize * feature.length
            records[:, offset:end].view(feature.dtype)[:] = values  # (n, length)
        begin, end = _LENGTH_BYTES + _CRC_BYTES, layout.stride - _CRC_BYTES
        checksums = masked_crc32c([record[begin:end].tobytes() for record in records])
        records[:, end:] = checksums.view(np.uint8).reshape(num_rows, _CRC_BYTES)  # (n, 4)
        self._file.write(records.data)
        self._hash.update(records.data)
        self.num_rows += num_rows
        self.max_id = max(self.max_id, int(features[TOKENS].max()))

    def close(self, source: str) -> ShardInfo:
        """Makes the shard durable under its name and returns what the manifest says of it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._temporary, self._path)
        fsync_directory(self._path.parent)
        num_bytes = self.num_rows * self._layout.stride
        return ShardInfo(
            self._path.name, source, self.num_rows, self.max_id, num_bytes, self._hash.hexdigest()
        )


class ShardReader:
    """Reads any row of a shard from the mapped file.

    Args:
      path: of the shard; its size is rows x stride.
      features: as the manifest has them.
      stride: bytes of one record.
      num_rows: of the shard.
    """

    def __init__(
        self, path: Path, features: Mapping[str, Mapping[str, Any]], stride: int, num_rows: int
    ) -> None:
        self._features = features
        with open(path, "rb") as file:
            self._mapped = mmap.mmap(file.fileno(), num_rows * stride, prot=mmap.PROT_READ)
        advise_random(self._mapped)
        plain = self._records = np.frombuffer(self._mapped, np.uint8).reshape(num_rows, stride)
        self._columns = {name: plain[:, _column(feature)] for name, feature in features.items()}

    def read(self, name: str, rows: np.ndarray | slice) -> np.ndarray:
        """Returns one feature of rows: (n, length), of the stored dtype.

        Args:
          name: of the feature.
          rows: (n,) indices, or a slice, which copies nothing.
        """
        return self._columns[name][rows].view(self._features[name]["dtype"])

    def stored(self, first: int, last: int) -> memoryview:
        """Returns the bytes of rows [first, last) as they are stored."""
        return self._records[first:last].data.cast("B")

    def read_ahead(self, rows: np.ndarray, count: int) -> None:
        """Has the kernel read `count` rows from each of `rows` on, in the background."""
        stride = self._records.shape[1]
        advise_needed(self._mapped, rows * stride, count * stride)

    def find_damage(self) -> int:
        """Returns the first row whose checksum is wrong, or -1."""
        begin, end = _LENGTH_BYTES + _CRC_BYTES, self._records.shape[1] - _CRC_BYTES
        for first in range(0, len(self._records), _CHECKED_ROWS):
            block = self._records[first : first + _CHECKED_ROWS]
            found = masked_crc32c([record[begin:end].tobytes() for record in block])
            stored = np.ascontiguousarray(block[:, end:]).view("<u4")[:, 0]  # (n, 4) -> (n,)
            wrong = np.flatnonzero(found != stored)
            if len(wrong):
                return first + int(wrong[0])
        return -1


def _column(feature: Mapping[str, Any]) -> slice:
    offset = feature["offset"]
    return slice(offset, offset + np.dtype(feature["dtype"]).itemsize * feature["length"])
