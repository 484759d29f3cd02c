"""A folder or file that appears whole or not at all. TensorFlow-free."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tfbig.durable_file import fsync_directory
from tfbig.errors import UserError


@contextlib.contextmanager
def appearing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Hands out a temporary folder, whose name becomes `path` when the block ends well.

    Args:
      path: of what is written; it must not exist.

    Raises:
      UserError: it exists, or cannot be made.

    Example:
      with appearing("exports/first") as folder:
        (folder / "config.json").write_text("{}")
    """
    target = Path(path)
    refuse_existing(target)
    temporary = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror} ({error.filename}).") from error
    try:
        yield temporary
        fsync_directory(temporary)
        refuse_existing(target)
        os.rename(temporary, target)
        fsync_directory(target.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise UserError(f"cannot write {target}: {error.strerror}.") from error
        raise


@contextlib.contextmanager
def appearing_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Hands out a temporary name with the same suffix, which becomes `path` when all went well.

    Args:
      path: of the file; it must not exist.

    Raises:
      UserError: it exists, or cannot be written.
    """
    target = Path(path)
    with appearing(target.with_name(f".{target.name}.folder")) as folder:
        refuse_existing(target)
        temporary = folder / target.name
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.rename(temporary, target)
    target.with_name(f".{target.name}.folder").rmdir()


def refuse_existing(path: Path) -> None:
    """Raises UserError when there is something at `path`: nothing is overwritten."""
    if os.path.lexists(path):
        raise UserError(f"{path} exists: name another --output, or remove it.")
