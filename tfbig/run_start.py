"""The start of a run: its folder is made, and taken by this job alone."""

import contextlib
from typing import Any

from tfbig.config import Config
from tfbig.errors import UserError
from tfbig.run_folder import RunFolder, archive_for_restart
from tfbig.run_lock import RunLock
from tfbig.run_state import check_room


def make_run_folder(
    config: Config, folder: RunFolder, trainer: Any
) -> contextlib.AbstractContextManager:
    """Has rank 0 make the run's folder and hold its lock; with --restart the old one is renamed.

    Returns:
      What is to be left when the run ends: it sets the lock free.

    Raises:
      UserError: on every rank, when another job holds the folder, when it cannot be made, or when
        it has no room for a checkpoint.
    """
    held = contextlib.ExitStack()
    error: UserError | None = None
    if trainer.rank == 0:
        try:
            _take_run_folder(config, folder, held)
        except UserError as failure:
            held.close()
            error = failure
    if trainer.agree(int(error is not None), "max"):
        held.close()
        raise error or UserError(f"rank 0 could not make {folder.path}")
    return held


def _take_run_folder(config: Config, folder: RunFolder, held: contextlib.ExitStack) -> None:
    check_room(config, folder)
    if config.run.restart:
        if folder.path.is_dir():
            held.enter_context(RunLock(folder.path))  # it goes with the folder
        archive = archive_for_restart(folder.path)
        if archive is not None:
            print(f"{folder.path} is now {archive}", flush=True)
    folder.create()
    lock = held.enter_context(RunLock(folder.path))
    if lock.note:
        print(lock.note, flush=True)
