"""Whether a run may use the folder that --run_dir names: nothing else of the user's is touched."""

import os
import re
from pathlib import Path

from tfbig.config import Config
from tfbig.errors import UserError
from tfbig.run_folder import RunFolder, foreign_contents, is_within

_VERIFY_NAME = re.compile(r"sgd|own|single_[a-z0-9]+")


def check_run_folder(config: Config) -> None:
    """Checks, before anything is written, that --run_dir names a run, or nothing yet.

    Args:
      config: `run.run_dir`, `run.restart`, `run.verify`, `run.init_from` and `data.data`.

    Raises:
      UserError: the folder holds something else, is the data's, or cannot be renamed from here.
    """
    folder = RunFolder(config.run.run_dir).path
    if _same(folder, config.data.data):
        raise UserError(
            f"--run_dir={folder} is the data folder: a run keeps its files apart from its data; "
            f"choose another run_dir, such as runs/{config.run.preset}."
        )
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise UserError(f"--run_dir={folder} is a file and no folder: choose another run_dir.")
    what = foreign_contents(folder)
    if what:
        raise UserError(
            f"--run_dir={folder} {what}: nothing in it was touched; choose another run_dir, one "
            "that does not exist yet."
        )
    if config.run.restart and os.path.isdir(folder):
        _check_renaming(config, folder)
    if config.run.verify:
        _check_verify_folder(RunFolder(folder))


def _same(folder: Path, other: str) -> bool:
    return bool(other) and os.path.realpath(folder) == os.path.realpath(os.path.expanduser(other))


def _check_renaming(config: Config, folder: Path) -> None:
    """Checks that --restart renames nothing that is in use."""
    for name, path in (
        ("the working directory is", os.curdir),
        (f"--data={config.data.data} lies", config.data.data),
        (f"--init_from={config.run.init_from} lies", config.run.init_from),
    ):
        if path and is_within(path, folder):
            raise UserError(
                f"--restart renames --run_dir={folder}, but {name} in it: choose another run_dir, "
                "or start from elsewhere."
            )


def _check_verify_folder(folder: RunFolder) -> None:
    """Checks that what --verify removes at its end is its own."""
    scratch = folder.verify_dir
    names = [entry.name for entry in scratch.iterdir()] if scratch.is_dir() else []
    foreign = sorted(name for name in names if not _VERIFY_NAME.fullmatch(name))
    if foreign or (scratch.exists() and not scratch.is_dir()):
        raise UserError(
            f"--verify writes into {scratch} and removes it, but that holds something else "
            f"({(foreign or [scratch.name])[0]}): move it, or choose another run_dir."
        )
