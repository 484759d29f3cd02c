"""Bytes of input files: any path TensorFlow's gfile knows, any usual compression, damage found."""

import bz2
import contextlib
import glob
import io
import lzma
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import IO, Any, NamedTuple, Protocol

import zstandard

from tfbig.errors import UserError

CODECS = (".zst", ".gz", ".bz2", ".xz")
_READ_BYTES = 1 << 18
_FRAME_BYTES = 1 << 20  # that a zst frame hands out at a time


class _Decompressor(Protocol):
    """What the decompressors of zstandard, zlib, bz2 and lzma have in common."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


class FileFacts(NamedTuple):
    """What a directory says of a file."""

    num_bytes: int
    changed: int  # nanoseconds; 0 where the file system is not local


class ByteReader:
    """Hands out a file's bytes as they are stored, and remembers their hash.

    Args:
      path: a local path or a URL that tf.io.gfile opens.
      start: first byte.
      stop: byte after the last one; -1 means the file's end.

    Attributes:
      num_bytes: read so far.
    """

    def __init__(self, path: str, start: int = 0, stop: int = -1) -> None:
        self._path, self._start, self._stop = path, start, stop
        self._hash = sha256()
        self.num_bytes = 0

    def __iter__(self) -> Iterator[bytes]:
        with open_binary(self._path) as file:
            if self._start:
                file.seek(self._start)
            remaining = self._stop - self._start
            while self._stop < 0 or remaining > 0:
                size = _READ_BYTES if self._stop < 0 else min(_READ_BYTES, remaining)
                chunk = file.read(size)
                if not chunk:
                    return
                remaining -= len(chunk)
                self.num_bytes += len(chunk)
                self._hash.update(chunk)
                yield chunk

    @property
    def sha256(self) -> str:
        """Digest of the bytes read so far."""
        return self._hash.hexdigest()


@dataclass
class Meter:
    """How far a file is read that a library reads, whose bytes we don't see.

    Attributes:
      num_bytes: stored bytes read so far, about.
    """

    num_bytes: int = 0


class RemoteFile(io.RawIOBase):
    """A file that tf.io.gfile opens, with all that libraries ask of a file of Python's own.

    Args:
      path: a URL.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self._file = gfile().GFile(path, "rb")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with _errors_of_the_system():
            self._file.seek(offset, whence)
        return self.tell()

    def tell(self) -> int:
        with _errors_of_the_system():
            return int(self._file.tell())

    def readinto(self, buffer: Any) -> int:
        with _errors_of_the_system():
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


@contextlib.contextmanager
def _errors_of_the_system() -> Iterator[None]:
    """Turns TensorFlow's errors into those that libraries expect of a file."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if type(error).__module__.startswith("tensorflow"):
            raise OSError(_first_line(error)) from None
        raise


def is_remote(path: str) -> bool:
    """Returns whether a path is a URL, as gs://bucket/name is."""
    return "://" in path


def gfile() -> Any:
    """Returns tf.io.gfile, which knows gs:// and whatever else TensorFlow was built with."""
    import tensorflow as tf

    return tf.io.gfile


@contextlib.contextmanager
def open_binary(path: str) -> Iterator[IO[bytes]]:
    """Opens a file for reading.

    Raises:
      UserError: it cannot be opened or read.
    """
    try:
        if is_remote(path):
            with gfile().GFile(path, "rb") as file:
                yield file
        else:
            with open(path, "rb") as file:
                yield file
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}.") from None
    except Exception as error:
        if type(error).__module__.startswith("tensorflow"):
            raise UserError(f"cannot read {path}: {_first_line(error)}") from None
        raise


def list_files(pattern: str, recursive: bool = True) -> list[str]:
    """Returns the files that a path, a folder or a glob names, sorted.

    Args:
      pattern: local or remote; of a folder all files are taken, however deep.
      recursive: whether `**` goes through folders.
    """
    if is_remote(pattern):
        return _list_remote(pattern)
    if os.path.isdir(pattern):
        found = []
        for folder, folders, names in os.walk(pattern, followlinks=True):
            found += [os.path.join(folder, name) for name in names]
            here = os.path.realpath(folder) + os.sep
            # A link to a folder above would be gone through for ever.
            folders[:] = [
                name
                for name in folders
                if not here.startswith(os.path.realpath(os.path.join(folder, name)) + os.sep)
            ]
        return sorted(found)
    names = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=recursive)
    return sorted(name for name in names if os.path.isfile(name))


def _list_remote(pattern: str) -> list[str]:
    files = gfile()
    try:
        if files.isdir(pattern):
            found = [
                f"{folder.rstrip('/')}/{name}"
                for folder, _, names in files.walk(pattern)
                for name in names
            ]
        else:
            found = [name for name in files.glob(pattern) if not files.isdir(name)]
    except Exception as error:  # TensorFlow raises its own kinds
        raise UserError(f"cannot list {pattern}: {_first_line(error)}") from None
    return sorted(found)


def file_facts(path: str) -> FileFacts:
    """Returns a file's size and when it was changed."""
    if is_remote(path):
        return FileFacts(int(gfile().stat(path).length), 0)
    found = os.stat(path)
    return FileFacts(found.st_size, found.st_mtime_ns)


def codec_of(name: str) -> str:
    """Returns the suffix of a name's compression, "" for none.

    >>> codec_of("train/00.jsonl.zst")
    '.zst'
    """
    return next((codec for codec in CODECS if name.endswith(codec)), "")


def decompress(chunks: Iterator[bytes], codec: str, name: str) -> Iterator[bytes]:
    """Yields the contents of all frames (members, streams) of compressed data.

    Stream readers of zstandard stop after the first frame, and hand out a cut file without a word:
    here the end of each frame is asked for.

    Args:
      chunks: of the file.
      codec: one of CODECS, or "" for bytes as they are.
      name: of the file, for messages.

    Raises:
      UserError: the data is damaged or cut short.
    """
    checked = _checked(chunks, name)
    if not codec:
        yield from checked
        return
    frame, inside, first = _decompressor(codec), False, True
    for chunk in checked:
        first = False
        while chunk:
            if frame.eof:
                if codec != ".zst" and not chunk.strip(b"\0"):
                    break  # padding behind the last member, as gzip itself allows
                frame = _decompressor(codec)
            try:
                data = frame.decompress(chunk)
            except (zstandard.ZstdError, zlib.error, OSError, EOFError, lzma.LZMAError) as error:
                raise _damaged(name, codec, str(error)) from None
            chunk, inside = frame.unused_data, not frame.eof
            if data:
                yield data
    if inside or first:
        what = "it is empty" if first else f"its last {codec[1:]} frame has no end"
        raise UserError(f"{name} is cut short: {what}. Get the file again.")


def check_is_no_pointer(start: bytes, name: str) -> None:
    """Raises UserError when a file's first bytes are those of a Git LFS pointer."""
    if start.startswith(b"version https://git-lfs."):
        raise UserError(f"{name} is a Git LFS pointer, not the file: run `git lfs pull`.")


def _checked(chunks: Iterator[bytes], name: str) -> Iterator[bytes]:
    """Yields chunks of a file that is no pointer."""
    for number, chunk in enumerate(chunks):
        if not number:
            check_is_no_pointer(chunk, name)
        yield chunk


def _decompressor(codec: str) -> _Decompressor:
    if codec == ".zst":
        # Frames of lm_dataformat and of `zstd --long` may need windows beyond the default 128 MiB.
        return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj(_FRAME_BYTES)
    if codec == ".gz":
        return zlib.decompressobj(wbits=31)
    return bz2.BZ2Decompressor() if codec == ".bz2" else lzma.LZMADecompressor()


def _damaged(name: str, codec: str, why: str) -> UserError:
    return UserError(
        f"{name} is not intact {codec[1:]} data: {why}. Nothing behind the damage can be read: get "
        "the file again."
    )


def split_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yields lines, ended by newline alone: U+2028 and the like may stand inside a record."""
    for block in line_blocks(chunks):
        yield from block


def line_blocks(chunks: Iterator[bytes]) -> Iterator[list[bytes]]:
    """Yields the lines of `split_lines`, those of a chunk together."""
    pieces: list[bytes] = []  # of a line that spans chunks; joined once, however long it is
    for chunk in chunks:
        lines = chunk.split(b"\n")
        pieces.append(lines[0])
        if len(lines) > 1:
            lines[0] = b"".join(pieces)
            pieces = [lines.pop()]
            yield lines
    last = b"".join(pieces)
    if last:
        yield [last]


class ForwardFile:
    """A file-like view of chunks, read forward: what tarfile's stream mode needs.

    Attributes:
      last: the last bytes that were handed out, up to 1024.
    """

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest, self.last = chunks, b"", b""

    def read(self, size: int = -1) -> bytes:
        """Returns up to `size` bytes, fewer only at the end; all of them without a size."""
        pieces, missing = [], size
        while missing:
            if not self._rest:
                self._rest = next(self._chunks, b"")
                if not self._rest:
                    break
            taken = self._rest if size < 0 else self._rest[:missing]
            self._rest = self._rest[len(taken) :]
            missing -= len(taken)
            pieces.append(taken)
        data = b"".join(pieces)
        self.last = (self.last + data[-1024:])[-1024:]
        return data


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
