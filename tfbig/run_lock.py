"""One job a run folder: a lock that its holder's death sets free, between hosts as well."""

import contextlib
import datetime
import errno
import fcntl
import os
import socket
import time
from pathlib import Path

import orjson

from tfbig.durable_file import write_all
from tfbig.errors import UserError

LOCK_NAME = "run.lock"
_POLL_SECONDS = 0.5
# File systems that know no locks say so by one of these (flock(2)); some Lustre mounts do.
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


class RunLock:
    """The right to write to a run's folder, held by rank 0 of one job.

    It is flock(2) on the file run.lock: the kernel sets it free when the holder ends, by kill -9
    too, and NFS carries it between hosts. The file's text names the holder.

    Args:
        folder: the run's, which exists.

        patience: seconds in which the holder may still let go, as a lost host's does late.

    Attributes:
        note: one line where the file system knows no locks, so that nothing is held; else "".

    Raises:
        UserError: another job holds it, or the folder can't be written to; nothing was changed.

    Example:
        >>> with RunLock("runs/first"):
        ...     ...
    """

    def __init__(self, folder: str | os.PathLike[str], patience: float = 0.0) -> None:
        self._deadline = time.monotonic() + patience
        self.path = Path(folder) / LOCK_NAME
        self.note = ""
        self._descriptor = -1
        while self._descriptor < 0:
            descriptor = self._open()
            try:
                self._take(descriptor)
                if self._is_current(descriptor):  # else its folder was renamed meanwhile
                    self._descriptor = descriptor
            finally:
                if self._descriptor < 0:
                    os.close(descriptor)
        with contextlib.suppress(OSError):  # a full disk: the lock holds without its text
            self._sign()

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Lets another job in; a second call does nothing. The file stays, empty."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
            os.close(descriptor)

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UserError(
                f"cannot write to the run's folder: {self.path}: {error.strerror}; change its "
                "permissions, or choose another --run_dir"
            ) from error

    def _take(self, descriptor: int) -> None:
        try:
            while not _flock(descriptor) and time.monotonic() < self._deadline:
                time.sleep(_POLL_SECONDS)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{self.path.parent} belongs to another job, {_holder(descriptor)}: wait until "
                "it ends, stop it, or choose another --run_dir. Nothing was changed."
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            self.note = (
                f"{self.path.parent}: its file system knows no locks ({error.strerror}); see to "
                "it that no second job writes there"
            )

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _sign(self) -> None:
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        write_all(self._descriptor, orjson.dumps(holder) + b"\n")


def _flock(descriptor: int) -> bool:
    """Returns whether the lock could be had; holding it already is no obstacle."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(descriptor: int) -> str:
    """Returns what the lock's file says of who holds it."""
    try:
        holder = orjson.loads(os.pread(descriptor, 4096, 0))
        since = datetime.datetime.fromtimestamp(holder["since"], datetime.timezone.utc)
        return f"host {holder['host']}, pid {holder['pid']}, since {since:%Y-%m-%d %H:%M:%S} UTC"
    except (OSError, ValueError, KeyError, TypeError):
        return "which has not said which one it is"
