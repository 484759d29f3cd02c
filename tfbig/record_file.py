"""JSON lines files: one record a line, appended; whole after a crash, and strict JSON."""

import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import orjson

from tfbig.durable_file import fsync_directory, write_all
from tfbig.errors import UserError

# Fields of numbers JSON has no word for: null in their place, and their names here.
NONFINITE_FIELD = "nonfinite"


class RecordWriter:
    """Appends records to a JSON lines file; each is in the kernel's hands when `write` returns.

    A last line that a crash tore is ended when it is a whole record; otherwise it is moved to
    `<name>.torn`, so that every line of the file is a record and nothing is lost.

    A number that JSON cannot hold is written as null, and named with its value in one more field,
    which the readers here undo: `{"loss": null, "nonfinite": {"loss": "nan"}}`.

    Args:
        path: the file; made when missing.
        durable: whether to fsync every record, for files of few.
    """

    def __init__(self, path: str | os.PathLike[str], durable: bool = False) -> None:
        self.path = Path(path)
        self._durable = durable
        is_new = not self.path.exists()
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(self.path, flags, 0o666)
        if is_new:
            fsync_directory(self.path.parent)
        self._mend_last_line()

    def __enter__(self) -> "RecordWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one record.

        Args:
            record: fields of JSON values or numpy scalars and arrays; `time` (seconds since 1970)
                is added when missing.

        Raises:
            OSError: when the disk is full, or failing; the file then ends with the record before.
        """
        line = encode_record({**record, "time": record.get("time", time.time())}) + b"\n"
        size = os.fstat(self._descriptor).st_size
        try:
            write_all(self._descriptor, line)
            if self._durable:
                os.fsync(self._descriptor)
        except OSError as error:
            os.ftruncate(self._descriptor, size)
            raise OSError(error.errno, error.strerror, os.fspath(self.path)) from error

    def close(self) -> None:
        """Makes the records durable and closes the file; a second call does nothing."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _mend_last_line(self) -> None:
        size = os.fstat(self._descriptor).st_size
        tail = _last_line(self._descriptor, size)
        if not tail:
            return
        try:
            orjson.loads(tail)
        except orjson.JSONDecodeError:
            torn_path = self.path.with_name(self.path.name + ".torn")
            torn = os.open(torn_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            try:
                write_all(torn, tail + b"\n")
                os.fsync(torn)
            finally:
                os.close(torn)
            fsync_directory(self.path.parent)
            os.ftruncate(self._descriptor, size - len(tail))
        else:
            write_all(self._descriptor, b"\n")


def encode_record(record: Mapping[str, Any]) -> bytes:
    """Encodes a record as one line of strict JSON, without its end.

    Args:
        record: see RecordWriter.write.

    Example:
        >>> encode_record({"step": 3, "loss": float("inf")})
        b'{"step":3,"loss":null,"nonfinite":{"loss":"inf"}}'
    """
    assert NONFINITE_FIELD not in record, f"{NONFINITE_FIELD} is a name of this file's own"
    plain = dict(record)
    # A field that isn't finite inside a nested one is named by its dotted path.
    nonfinite = dict(_nonfinite(plain, ""))
    if nonfinite:
        plain[NONFINITE_FIELD] = nonfinite
    return orjson.dumps(plain, option=orjson.OPT_SERIALIZE_NUMPY)


def read_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads all records of a JSON lines file, which may be in the middle of being written.

    Args:
        path: the file; a missing one has no records.

    Returns:
        The records, in the file's order; a last line without an end is left out unless it is
        a whole record.

    Raises:
        UserError: when another line is not a record.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    records = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            if number == len(lines):
                break
            raise UserError(
                f"{path}, line {number}, is not JSON ({error}); mend or remove that line"
            ) from error
        for name, value in record.pop(NONFINITE_FIELD, {}).items():
            _restore(record, name, float(value))
        records.append(record)
    return records


def _last_line(descriptor: int, size: int) -> bytes:
    """Returns what stands after the last end of line; empty when the file ends with one."""
    tail = b""
    while len(tail) < size:
        begin = max(0, size - len(tail) - 64 * 1024)
        tail = os.pread(descriptor, size - len(tail) - begin, begin) + tail
        if b"\n" in tail:
            return tail[tail.rindex(b"\n") + 1 :]
    return tail


def _nonfinite(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yields the dotted paths and values of the numbers JSON cannot hold."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _nonfinite(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _nonfinite(inner, f"{path}.{index}")
    elif hasattr(value, "__float__") and not math.isfinite(value):
        yield path, str(float(value))


def _restore(container: Any, path: str, value: float) -> None:
    """Puts a number back where `_nonfinite` found it."""
    if isinstance(container, list):
        index, _, rest = path.partition(".")
        if rest:
            _restore(container[int(index)], rest, value)
        else:
            container[int(index)] = value
        return
    if path in container:
        container[path] = value
        return
    # A field's own name may have dots, such as a variable's path.
    for name in container:
        if path.startswith(f"{name}.") and isinstance(container[name], (dict, list)):
            _restore(container[name], path[len(name) + 1 :], value)
            return
