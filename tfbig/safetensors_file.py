"""Safetensors files, streamed: written one array at a time, read one rectangle at a time.

The format is that of https://github.com/huggingface/safetensors (README, "Format"): 8 bytes of
header length, a JSON header, then the tensors' bytes without holes. The library's own writer wants
every tensor in memory at once and computes no digest; its reader maps the file, so that an I/O
error is a SIGBUS instead of a message. Files of either are read by the other (tested).
"""

import hashlib
import math
import os
import struct
from typing import Any, NamedTuple

import numpy as np
import orjson

from tfbig.durable_file import FileDigest, unlink_quietly, write_all
from tfbig.rectangle import Rectangle

# numpy's name of a dtype -> the header's
_FORMAT_NAMES = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_NUMPY_NAMES = {name: numpy_name for numpy_name, name in _FORMAT_NAMES.items()}
_ML_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")

_MAX_HEADER_BYTES = 100_000_000  # the library's own limit
_WRITE_BYTES = 8 * 1024 * 1024  # hashed and written in turn, while they are in the CPU's cache
_READ_BYTES = 32 * 1024 * 1024  # the most that is read beyond what was asked for
# Shorter runs are not read one by one: a disk's latency (~100 us) is worth about as many bytes.
_SHORT_RUN_BYTES = 128 * 1024


class TensorToWrite(NamedTuple):
    """One tensor of a file to be written.

    Args:
        key: its name in the file.
        dtype: numpy dtype of the stored bytes.
        shape: its shape.
        array: anything that numpy.asarray takes; it is asked for when its turn comes.
    """

    key: str
    dtype: np.dtype
    shape: tuple[int, ...]
    array: Any


class StoredTensor(NamedTuple):
    """One tensor of a file.

    Args:
        dtype: numpy dtype of the stored bytes.
        shape: its shape.
        offset: of its first byte in the file.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int


def dtype_of(name: str) -> np.dtype:
    """Returns the native dtype of a name that numpy or ml_dtypes knows.

    Args:
        name: such as "float32" or "bfloat16".

    Raises:
        ValueError: when safetensors has no such dtype.
    """
    if name not in _FORMAT_NAMES:
        raise ValueError(f"safetensors cannot store dtype {name}")
    if name in _ML_DTYPES:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def write_tensors(
    path: str | os.PathLike[str], tensors: list[TensorToWrite], metadata: dict[str, str]
) -> FileDigest:
    """Writes a new safetensors file and fsyncs it, with one array in memory at a time.

    `tensors` is emptied on the way, so that an array nobody else holds is freed once written.

    Args:
        path: a file that does not exist; two writers of one name are never mixed.
        tensors: what to write; sorted by item size, so that every tensor is aligned.
        metadata: the header's free text fields.

    Returns:
        The file's sha256 and size.

    Raises:
        FileExistsError: when `path` exists.
        OSError: when the disk is full, or failing; the file is then removed.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            digest = write_open(descriptor, tensors, metadata)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except BaseException:
        unlink_quietly(path)
        raise
    return digest


def write_open(
    descriptor: int, tensors: list[TensorToWrite], metadata: dict[str, str]
) -> FileDigest:
    """Writes into an open file what `write_tensors` writes into a new one."""
    tensors.sort(key=lambda tensor: -tensor.dtype.itemsize)
    header = _encode_header(tensors, metadata)
    sha256 = hashlib.sha256(header)
    num_bytes = len(header)
    write_all(descriptor, header)
    tensors.reverse()
    while tensors:
        num_bytes += _write_tensor(descriptor, tensors.pop(), sha256)
    return FileDigest(sha256.hexdigest(), num_bytes)


def _encode_header(tensors: list[TensorToWrite], metadata: dict[str, str]) -> memoryview:
    fields: dict[str, Any] = {"__metadata__": metadata}
    begin = 0
    for tensor in tensors:
        assert tensor.key not in fields, f"key {tensor.key} occurs twice"
        end = begin + math.prod(tensor.shape) * tensor.dtype.itemsize
        fields[tensor.key] = {
            "dtype": _FORMAT_NAMES[tensor.dtype.name],
            "shape": tensor.shape,
            "data_offsets": [begin, end],
        }
        begin = end
    encoded = orjson.dumps(fields)
    encoded += b" " * (-len(encoded) % 8)
    return memoryview(struct.pack("<Q", len(encoded)) + encoded)


def _write_tensor(descriptor: int, tensor: TensorToWrite, sha256: Any) -> int:
    """Writes and hashes one tensor's bytes; returns how many there are."""
    array = np.asarray(tensor.array)
    assert array.shape == tensor.shape and array.dtype.name == tensor.dtype.name, (
        f"{tensor.key} was announced as {tensor.dtype.name} {tensor.shape}, "
        f"but is {array.dtype.name} {array.shape}"
    )
    array = np.ascontiguousarray(array, dtype=tensor.dtype)
    view = array.reshape(-1).view(np.uint8).data
    for begin in range(0, len(view), _WRITE_BYTES):
        chunk = view[begin : begin + _WRITE_BYTES]
        sha256.update(chunk)
        write_all(descriptor, chunk)
    return len(view)


def read_header(descriptor: int) -> dict[str, StoredTensor]:
    """Reads which tensors an open safetensors file holds.

    Args:
        descriptor: the file.

    Returns:
        The tensors by key.

    Raises:
        ValueError: when it is not a whole safetensors file.
        OSError: when it cannot be read.
    """
    num_file_bytes = os.fstat(descriptor).st_size
    prefix = os.pread(descriptor, 8, 0)
    if len(prefix) < 8:
        raise ValueError("it ends before its header")
    (num_header_bytes,) = struct.unpack("<Q", prefix)
    if num_header_bytes > min(_MAX_HEADER_BYTES, num_file_bytes - 8):
        raise ValueError("it has no safetensors header")
    encoded = memoryview(bytearray(num_header_bytes))
    _read_exactly(descriptor, encoded, 8)
    tensors = {}
    try:
        for key, entry in orjson.loads(encoded).items():
            if key == "__metadata__":
                continue
            dtype = dtype_of(_NUMPY_NAMES[entry["dtype"]])
            begin, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            if end - begin != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"the sizes of {key} in its header contradict each other")
            tensors[key] = StoredTensor(dtype, shape, 8 + num_header_bytes + begin)
            if 8 + num_header_bytes + end > num_file_bytes:
                raise ValueError(f"it ends before the last byte of {key}")
    except (KeyError, TypeError, AttributeError, orjson.JSONDecodeError) as error:
        raise ValueError("its safetensors header is damaged") from error
    return tensors


def read_rectangle(
    descriptor: int, tensor: StoredTensor, wanted: Rectangle, out: np.ndarray
) -> None:
    """Reads a rectangle of a stored tensor, and at most 32 MiB besides it at a time.

    Long contiguous runs are read as they are; of short ones, whole rows are read at once and cut.

    Args:
        descriptor: the open file.
        tensor: where it stands in the file.
        wanted: a rectangle within it.
        out: array of wanted.shape and the tensor's dtype, filled; any strides.

    Raises:
        ValueError: when the file ends early.
        OSError: when it cannot be read.
    """
    assert out.shape == wanted.shape and out.dtype == tensor.dtype
    if out.size == 0:
        return
    # The dims after `dim` are wanted whole, so that a run spans dim `dim`'s range of them.
    dim = len(tensor.shape) - 1
    while dim > 0 and wanted.shape[dim] == tensor.shape[dim]:
        dim -= 1
    _read_dims(descriptor, tensor, wanted, out, 0, max(dim, 0))


def _read_dims(
    descriptor: int,
    tensor: StoredTensor,
    wanted: Rectangle,
    out: np.ndarray,
    dim: int,
    last_dim: int,
) -> None:
    """Reads dims `dim`.. of the tensor whose offset is that of its first element in them."""
    itemsize = tensor.dtype.itemsize
    inner_bytes = math.prod(tensor.shape[dim + 1 :]) * itemsize  # of one index in dim
    if dim == last_dim:
        begin = tensor.offset + (wanted.start[dim] * inner_bytes if tensor.shape else 0)
        _read_run(descriptor, begin, tensor.dtype, out)
        return
    run_bytes = math.prod(wanted.shape[last_dim:]) * itemsize
    first, count = wanted.start[dim], wanted.shape[dim]
    if count == 1 or run_bytes >= _SHORT_RUN_BYTES or inner_bytes > _READ_BYTES:
        for i in range(count):
            row = tensor._replace(offset=tensor.offset + (first + i) * inner_bytes)
            _read_dims(descriptor, row, wanted, out[i], dim + 1, last_dim)
        return
    inner = Rectangle(wanted.start[dim + 1 :], wanted.shape[dim + 1 :])
    columns = (slice(None), *inner.slices)
    num_rows = max(1, _READ_BYTES // inner_bytes)
    for i in range(0, count, num_rows):
        rows = np.empty((min(num_rows, count - i), *tensor.shape[dim + 1 :]), tensor.dtype)
        _read_run(descriptor, tensor.offset + (first + i) * inner_bytes, tensor.dtype, rows)
        out[i : i + num_rows] = rows[columns]


def _read_run(descriptor: int, offset: int, dtype: np.dtype, out: np.ndarray) -> None:
    """Fills `out` with consecutive bytes; straight into it where it is contiguous."""
    if out.flags.c_contiguous:
        _read_exactly(descriptor, out.reshape(-1).view(np.uint8).data, offset)
        return
    if out.nbytes > _READ_BYTES and out.ndim > 1:
        for i in range(len(out)):
            _read_run(descriptor, offset + i * (out.nbytes // len(out)), dtype, out[i])
        return
    run = np.empty(out.shape, dtype)
    _read_run(descriptor, offset, dtype, run)
    out[...] = run


def _read_exactly(descriptor: int, buffer: memoryview, offset: int) -> None:
    while buffer:
        count = os.preadv(descriptor, [buffer], offset)
        if count == 0:
            raise ValueError("it ends early")
        buffer, offset = buffer[count:], offset + count
