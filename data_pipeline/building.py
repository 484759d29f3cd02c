"""A data folder while it is made: one process at a time, and no leftovers of an interrupted one."""

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from data_pipeline import manifest
from tfbig.errors import UserError

# Says that what lies here is half made and ours: only then may it be replaced.
MARKER = ".preparing"
_OUR_FOLDERS = ("corpus", "tokens")
_OUR_FILES = re.compile(
    rf"({manifest.DATASET_NAME}-\w+\.tfrecord-\d+-of-\d+|tokenizer\.json|features\.json"
    r"|dataset_info\.json|manifest\.json)(\.tmp.*)?"
)


@contextlib.contextmanager
def building(folder: Path) -> Iterator[None]:
    """Makes `folder` empty of an earlier attempt's files, and marks it until the block is done.

    Args:
      folder: of the data; made where it is missing.

    Raises:
      UserError: the folder holds something that is not ours, or another process is at it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"--data={folder}: there is a file of that name.") from None
    names = os.listdir(folder)
    if names and MARKER not in names:
        raise UserError(
            f"--data={folder} is not empty and not a data folder: name another, or an empty one."
        )
    with open(folder / MARKER, "a") as marker:
        try:
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is preparing {folder}: wait for it.") from None
        _remove_leftovers(folder)
        try:
            yield
        except UserError:  # what is half made can't be finished by trying again
            _remove_leftovers(folder)
            (folder / MARKER).unlink()
            with contextlib.suppress(OSError):
                folder.rmdir()
            raise
        remove_marker(folder)


def remove_marker(folder: Path) -> None:
    """Removes the marker of a complete folder, which a kill right before that leaves behind."""
    with contextlib.suppress(OSError):
        (folder / MARKER).unlink()


def _remove_leftovers(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        if path.name in _OUR_FOLDERS and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif _OUR_FILES.fullmatch(path.name):
            path.unlink()
