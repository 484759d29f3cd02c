"""A data folder while it is made: whose it is, what an interrupted attempt left, and its end."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from data_pipeline import manifest
from data_pipeline.plan import PLAN
from data_pipeline.work import FOLDER as WORK
from tfbig.durable_file import write_atomic
from tfbig.errors import UserError

# Says that what lies here is half made and ours: only then may it be replaced.
MARKER = ".preparing"
_OUR_FOLDERS = ("corpus", "tokens", WORK)
_SHARD = re.compile(rf"{manifest.DATASET_NAME}-\w+\.tfrecord-\d+-of-\d+(\.tmp.*)?")
_OUR_FILES = re.compile(
    r"(tokenizer\.json|features\.json|dataset_info\.json|manifest\.json|report\.html"
    r"|bad_records\.jsonl)(\.tmp.*)?"
)
# Results that hold for one plan only; those of the stages before are named by what they are of.
_PLANS_OWN = ("order-*", "shard-*", "duplicates-*", "finish-*")
_PATIENCE = 30.0  # seconds for another process to write its plan


@contextlib.contextmanager
def building(folder: Path, plan: bytes) -> Iterator[None]:
    """Takes part in the making of `folder`, marked as half made until `finish_building`.

    Any number of processes with the same plan work on one folder.

    Args:
      folder: of the data; made where it is missing.
      plan: the file of the plan.

    Raises:
      UserError: the folder holds something that is not ours, or processes are at it with another
        plan.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"--data={folder}: there is a file of that name.") from None
    except OSError as error:
        raise UserError(
            f"--data={folder} cannot be made: {error.strerror}; name another."
        ) from None
    names = os.listdir(folder)
    if names and MARKER not in names:
        raise UserError(
            f"--data={folder} is not empty and not a data folder: name another, or an empty one."
        )
    with open(folder / MARKER, "a") as marker:
        _take_part(folder, plan, marker.fileno())
        try:
            yield
        except UserError:
            # Without a single result there is nothing to keep.
            if not any((folder / WORK / "results").glob("*")) and _lock(marker.fileno(), True):
                remove_all(folder)
            raise


def _take_part(folder: Path, plan: bytes, marker: int) -> None:
    """Joins those who have the same plan; who comes first writes it."""
    path, deadline = folder / PLAN, time.monotonic() + _PATIENCE
    while True:
        if _lock(marker, exclusive=True):
            if not path.exists() or path.read_bytes() != plan:
                _remove_plan(folder)
                path.parent.mkdir(exist_ok=True)
                write_atomic(path, plan)
        if _lock(marker, exclusive=False) and path.exists():
            if path.read_bytes() == plan:
                return
            raise UserError(
                f"another process is preparing {folder} with other options: wait for it, or name "
                "another --data."
            )
        if time.monotonic() > deadline:
            raise UserError(f"another process holds {folder} and does not go on: end it.")
        time.sleep(0.1)


def _lock(descriptor: int, exclusive: bool) -> bool:
    try:
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def finish_building(folder: Path) -> None:
    """Removes what only the making needed; the manifest is there."""
    if not manifest.read(folder).contents["token_store"]:
        shutil.rmtree(folder / "tokens", ignore_errors=True)
    shutil.rmtree(folder / WORK, ignore_errors=True)
    with contextlib.suppress(OSError):
        (folder / MARKER).unlink()


def remove_other_shards(folder: Path, files: set[str]) -> None:
    """Removes shards that are not among `files`: those of an earlier plan."""
    for path in folder.iterdir():
        if _SHARD.fullmatch(path.name) and path.name not in files:
            path.unlink()


def remove_all(folder: Path) -> None:
    """Removes everything of ours, and the folder when nothing else is in it."""
    for path in sorted(folder.iterdir()):
        if path.name in _OUR_FOLDERS and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif _OUR_FILES.fullmatch(path.name) or _SHARD.fullmatch(path.name):
            path.unlink()
    (folder / MARKER).unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()


def _remove_plan(folder: Path) -> None:
    """Removes what depends on an earlier plan; token stores are named by their contents."""
    for path in sorted(folder.iterdir()):
        if _OUR_FILES.fullmatch(path.name) or _SHARD.fullmatch(path.name):
            path.unlink()
    for pattern in _PLANS_OWN:
        for path in (folder / WORK).glob(f"results/{pattern}"):
            path.unlink()
        for path in (folder / WORK).glob(pattern):
            if path.is_dir():
                shutil.rmtree(path)
            else:  # what a killed process was writing
                path.unlink()
    for path in (folder / WORK).glob("dropped-*"):
        path.unlink()
    # Parts go once all chunks are tokenized: chunks of other names need them again.
    for path in (folder / WORK).glob("results/split-*"):
        parts = [piece["part"] for piece in json.loads(path.read_bytes())["pieces"]]
        if not all((folder / part).exists() for part in parts if part):
            path.unlink()
    for path in (folder / WORK).glob("results/chunk-*"):  # a store that a killed end has renamed
        if not (folder / "tokens" / path.stem).is_dir():
            path.unlink()
