"""Files that survive a crash: atomic replacement, directory fsync, and sha256 digests.

Every operation goes through a function of `os`, so that a test can stop a process at each one.
"""

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

_CHUNK_BYTES = 8 * 1024 * 1024


class FileDigest(NamedTuple):
    """What a manifest says of a file.

    Args:
        sha256: hexadecimal digest of the whole file.
        num_bytes: size of the file.
    """

    sha256: str
    num_bytes: int


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Writes all of `data`, however many writes that takes.

    Args:
        descriptor: an open file descriptor.
        data: bytes, or a memoryview of format "B".

    Raises:
        OSError: when the disk is full, or failing.
    """
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def fsync_directory(directory: str | os.PathLike[str]) -> None:
    """Makes the names in `directory` durable: renames, new files and removals.

    Args:
        directory: an existing directory.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Replaces `path` by `data`: a reader, or a crash at any point, sees all of the old or the new.

    The temporary file is `<path>.tmp-<pid>`; a crash may leave it behind, an exception doesn't.

    Args:
        path: the file to write; its directory exists.
        data: its whole contents.

    Raises:
        OSError: when it cannot be written; it names `path`, which is then as it was.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException as error:
        unlink_quietly(temporary)
        if isinstance(error, OSError) and error.filename is None:  # as of a write
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        raise
    fsync_directory(path.parent)


def unlink_quietly(path: str | os.PathLike[str]) -> None:
    """Removes a file if it can be removed; for cleaning up after another error.

    Args:
        path: the file.
    """
    try:
        os.unlink(path)
    except OSError:
        pass


def digest_file(path: str | os.PathLike[str]) -> FileDigest:
    """Reads a whole file and returns its digest, holding 8 MiB of it at a time.

    Args:
        path: the file.

    Returns:
        Its sha256 and size.

    Raises:
        OSError: when it cannot be read.
    """
    sha256, num_bytes = hashlib.sha256(), 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while count := os.readv(descriptor, [buffer]):
            sha256.update(buffer[:count])
            num_bytes += count
    finally:
        os.close(descriptor)
    return FileDigest(sha256.hexdigest(), num_bytes)


def digest_problem(path: str | os.PathLike[str], expected: FileDigest) -> str | None:
    """Says what is wrong with a file whose digest is known; the size is checked first.

    Args:
        path: the file.
        expected: what it was when it was written.

    Returns:
        One line without the file's directory, or None when the file is intact.
    """
    name = os.path.basename(path)
    try:
        num_bytes = os.stat(path).st_size
        if num_bytes != expected.num_bytes:
            return f"{name} has {num_bytes} bytes, its manifest says {expected.num_bytes}"
        found = digest_file(path)
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    if found != expected:
        return f"{name} is damaged: its sha256 is not the manifest's"
    return None
