"""A run's folder of checkpoints: which there are, which to keep, and whether to resume from one.

Saving is in checkpoint_writer.py, reading in checkpoint_reader.py.
"""

import fnmatch
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from tfbig.checkpoint_format import (
    MANIFEST_NAME,
    UnreadableCheckpointError,
    step_of_directory,
)
from tfbig.checkpoint_reader import CheckpointReader
from tfbig.checkpoint_writer import remove_incomplete
from tfbig.durable_file import fsync_directory

_GIB = 1024**3


@dataclass(frozen=True)
class CheckpointInfo:
    """A complete checkpoint.

    Args:
        step: optimizer updates made when it was saved.
        path: its directory.
    """

    step: int
    path: Path

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """Its manifest, read when first asked for."""
        return CheckpointReader(self.path).manifest


def list_checkpoints(checkpoints_dir: str | os.PathLike[str]) -> list[CheckpointInfo]:
    """Lists the complete checkpoints of a folder, oldest first; directories only are read.

    Args:
        checkpoints_dir: a run's folder of checkpoints; it may be missing.
    """
    found = []
    for step, path in _step_directories(Path(checkpoints_dir)):
        if (path / MANIFEST_NAME).is_file():
            found.append(CheckpointInfo(step, path))
    return sorted(found, key=lambda info: info.step)


def latest(checkpoints_dir: str | os.PathLike[str]) -> CheckpointInfo | None:
    """Returns the complete checkpoint of the highest step, unread, or None.

    Args:
        checkpoints_dir: a run's folder of checkpoints.
    """
    found = list_checkpoints(checkpoints_dir)
    return found[-1] if found else None


def newest_that_verifies(
    checkpoints_dir: str | os.PathLike[str],
) -> tuple[CheckpointInfo | None, list[tuple[CheckpointInfo, str]]]:
    """Finds the newest checkpoint whose files are all intact.

    Args:
        checkpoints_dir: a run's folder of checkpoints.

    Returns:
        That checkpoint, or None; and the newer ones which are damaged, each with one line why.
    """
    rejected = []
    for info in reversed(list_checkpoints(checkpoints_dir)):
        try:
            CheckpointReader(info.path).verify()
        except UnreadableCheckpointError as error:
            rejected.append((info, str(error)))
        else:
            return info, rejected
    return None, rejected


def remove_leftovers(checkpoints_dir: str | os.PathLike[str]) -> list[Path]:
    """Removes directories of saves that never became complete.

    Only for one process at a time, and only while no rank saves: when a run starts.

    Args:
        checkpoints_dir: a run's folder of checkpoints.

    Returns:
        The directories removed.
    """
    directories = [path for _, path in _step_directories(Path(checkpoints_dir))]
    return [path for path in directories if remove_incomplete(path)]


def prune(
    checkpoints_dir: str | os.PathLike[str],
    keep_last: int,
    keep_every: int = 0,
    keep_best: int = 0,
    protect: Collection[int] = (),
) -> list[Path]:
    """Deletes old checkpoints, after the newest one has been read back and found intact.

    A checkpoint's manifest goes first, so that one whose deletion is interrupted doesn't exist.

    Args:
        checkpoints_dir: a run's folder of checkpoints.
        keep_last: how many of the newest to keep, at least 1.
        keep_every: also those whose step is a multiple of it; 0 for none.
        keep_best: also this many of lowest metadata["eval_loss"], the older of equals first.
        protect: steps to keep besides.

    Returns:
        The directories deleted.

    Raises:
        UnreadableCheckpointError: when the newest is damaged; nothing is deleted then.
    """
    assert keep_last >= 1, f"keep_last is {keep_last}"
    found = list_checkpoints(checkpoints_dir)
    kept = {info.step for info in found[-keep_last:]} | set(protect)
    if keep_every:
        kept |= {info.step for info in found if info.step % keep_every == 0}
    if keep_best:
        losses = sorted((_eval_loss(info), info.step) for info in found)
        kept |= {step for loss, step in losses[:keep_best] if math.isfinite(loss)}
    doomed = [info for info in found if info.step not in kept]
    if doomed:
        CheckpointReader(found[-1].path).verify()
    for info in doomed:
        _delete(info.path)
    return [info.path for info in doomed]


def nearest_folder(directory: str | os.PathLike[str]) -> Path:
    """Returns a folder, or the nearest one above it that exists."""
    folder = Path(os.path.abspath(os.path.expanduser(directory)))
    while not folder.is_dir():
        folder = folder.parent
    return folder


def free_disk_error(
    directory: str | os.PathLike[str], num_bytes: int, margin_bytes: int = _GIB // 4
) -> str | None:
    """Says that a checkpoint doesn't fit on the disk, before it is begun.

    Args:
        directory: where it is to be written; it need not exist.
        num_bytes: what it takes, over all ranks that write there.
        margin_bytes: what is to stay free besides.

    Returns:
        One line with the numbers, or None when there is room.
    """
    stat = os.statvfs(nearest_folder(directory))
    if stat.f_blocks == 0:  # /proc and the like: whoever writes there says what is wrong
        return None
    free_bytes = stat.f_bavail * stat.f_frsize
    if free_bytes >= num_bytes + margin_bytes:
        return None
    return (
        f"no room for a checkpoint in {directory}: it needs {num_bytes / _GIB:.2f} GiB and a "
        f"margin of {margin_bytes / _GIB:.2f} GiB, {free_bytes / _GIB:.2f} GiB are free; "
        "free some, keep fewer checkpoints, or choose another run_dir"
    )


def flatten_fields(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turns nested mappings into one of dotted names.

    Args:
        nested: such as a configuration by section.
        prefix: of every name.

    Returns:
        Values by "section.field"; an empty mapping is a value.

    Example:
        >>> flatten_fields({"model": {"num_layers": 2}, "seed": 1})
        {'model.num_layers': 2, 'seed': 1}
    """
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten_fields(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def compare_for_resume(
    saved: Mapping[str, Any], current: Mapping[str, Any], may_differ: Collection[str]
) -> list[str]:
    """Compares what a checkpoint was made with to what a run asks for, field by field.

    Values are compared as JSON holds them: a tuple equals the list it was saved as.

    Args:
        saved: "section.field" -> value, of the checkpoint.
        current: the same, of this run.
        may_differ: names that need not match; `parallel.*` stands for a section.

    Returns:
        One line for each field that must match and does not; none when the run can resume.
    """
    saved, current = _as_json(saved), _as_json(current)
    lines = []
    for name in [*saved, *(name for name in current if name not in saved)]:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in may_differ):
            continue
        there, here = (
            orjson.dumps(fields[name], option=orjson.OPT_SORT_KEYS).decode()
            if name in fields
            else "no such field"
            for fields in (saved, current)
        )
        if there != here:
            lines.append(f"{name}: the checkpoint has {there}, this run {here}")
    return lines


def _step_directories(checkpoints_dir: Path) -> list[tuple[int, Path]]:
    try:
        paths = list(checkpoints_dir.iterdir())
    except FileNotFoundError:
        return []
    steps = ((step_of_directory(path.name), path) for path in paths)
    return [(step, path) for step, path in steps if step is not None and path.is_dir()]


def _eval_loss(info: CheckpointInfo) -> float:
    try:
        loss = info.manifest.get("metadata", {}).get("eval_loss")
    except UnreadableCheckpointError:
        return math.inf
    return loss if isinstance(loss, (int, float)) and math.isfinite(loss) else math.inf


def _delete(directory: Path) -> None:
    os.unlink(directory / MANIFEST_NAME)
    fsync_directory(directory)
    remove_incomplete(directory)


def _as_json(fields: Mapping[str, Any]) -> dict[str, Any]:
    return orjson.loads(orjson.dumps(dict(fields), option=orjson.OPT_SERIALIZE_NUMPY))
