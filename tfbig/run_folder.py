"""The folder of a run: its files' names, and the writers and readers of those that are JSON.

config.json  metrics.jsonl  events.jsonl  tensorboard/  checkpoints/  profiler-output/
report.html  run.lock  heartbeats/  hang-rank-NNNNN.txt
"""

import contextlib
import importlib.metadata
import os
import platform
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from tfbig.durable_file import fsync_directory, write_atomic
from tfbig.errors import UserError
from tfbig.record_file import RecordWriter, read_records
from tfbig.run_lock import LOCK_NAME

_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_VERSIONED_PACKAGES = (
    "tfbig",
    "tensorflow",
    "tensorflow-cpu",
    "keras",
    "horovod",
    "numpy",
    "tokenizers",
    "safetensors",
)
_CHECKPOINT = re.compile(r"step_\d{8,}")
# What a run may have written before its config.json, or what is left where that was removed.
_OWN_NAME = re.compile(
    r"checkpoints|run\.lock|metrics\.jsonl|events\.jsonl|tensorboard|profiler-output"
    r"|report\.html|tokenizer\.json|heartbeats|hang-rank-\d+\.txt|\.shared-\d+"
    r"|.*\.torn|.*\.tmp-\d+"
)


class RunFolder:
    """Where a run's files are. Making one makes no folder: `create` does.

    Args:
        path: the run's folder, on a file system that is mounted here.

    Raises:
        UserError: when it is a URL, such as gs://bucket/run.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        text = os.fspath(path)
        if _REMOTE.match(text):
            raise UserError(
                f"{text} is not a folder on this machine: mount the bucket (gcsfuse, mount-s3, "
                "NFS) and name the mounted folder, or write here and copy afterwards"
            )
        if not text:
            raise UserError("the run's folder has an empty name; name one, such as runs/first")
        self.path = Path(os.path.expanduser(text))

    @property
    def config_path(self) -> Path:
        """The resolved configuration, with versions and command."""
        return self.path / "config.json"

    @property
    def tokenizer_path(self) -> Path:
        """The run's own copy of its data's tokenizer."""
        return self.path / "tokenizer.json"

    @property
    def metrics_path(self) -> Path:
        """One JSON record a line, of kind train or eval."""
        return self.path / "metrics.jsonl"

    @property
    def events_path(self) -> Path:
        """One JSON record a line, of what happened when and why."""
        return self.path / "events.jsonl"

    @property
    def tensorboard_dir(self) -> Path:
        """TensorBoard's event files."""
        return self.path / "tensorboard"

    @property
    def checkpoints_dir(self) -> Path:
        """One directory a checkpoint."""
        return self.path / "checkpoints"

    @property
    def profiler_dir(self) -> Path:
        """What the profiler measured."""
        return self.path / "profiler-output"

    @property
    def report_path(self) -> Path:
        """The report of the run."""
        return self.path / "report.html"

    @property
    def heartbeats_dir(self) -> Path:
        """One small file a rank, while the run goes on: where it is."""
        return self.path / "heartbeats"

    def hang_path(self, rank: int) -> Path:
        """What a rank's watchdog wrote when nothing moved any more."""
        return self.path / f"hang-rank-{rank:05d}.txt"

    @property
    def verify_dir(self) -> Path:
        """What --verify writes and removes again, beside the folder."""
        absolute = Path(os.path.abspath(self.path))
        return absolute.with_name(f"{absolute.name}.verify")

    def create(self) -> None:
        """Makes the folder and the one for checkpoints; one that exists is kept.

        Raises:
            UserError: when it cannot be made or written to.
        """
        try:
            self.checkpoints_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot make the run's folder {self.path}: {error.strerror} "
                f"({error.filename}); choose another run_dir"
            ) from error
        self._check_writable()

    def check_can_be_made(self) -> None:
        """Checks that `create` will succeed; leaves nothing behind.

        Raises:
            UserError: when it cannot be made or written to.
        """
        missing = [path for path in (self.path, *self.path.parents) if not path.exists()]
        if not missing:
            self._check_writable()
            return
        self.create()
        with contextlib.suppress(OSError):  # another job may use it already
            for path in (self.checkpoints_dir, *missing):
                path.rmdir()

    def _check_writable(self) -> None:
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise UserError(
                f"the run's folder {self.path} cannot be written to; change its permissions or "
                "choose another run_dir"
            )

    def remove_if_empty(self) -> None:
        """Undoes `create`; a folder that holds anything but its lock stays."""
        with contextlib.suppress(OSError):
            self.checkpoints_dir.rmdir()
            if [entry.name for entry in self.path.iterdir()] == [LOCK_NAME]:
                (self.path / LOCK_NAME).unlink()
            self.path.rmdir()

    def write_config(
        self,
        config: Mapping[str, Any],
        command: Sequence[str],
        layout: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes config.json atomically.

        Args:
            config: the resolved configuration, by section.
            command: the command line, argument by argument.
            layout: how the model is cut over the ranks, where it is.
        """
        record = {
            "config": config,
            "command": list(command),
            "layout": layout,
            "versions": installed_versions(),
            "time": time.time(),
        }
        write_atomic(self.config_path, orjson.dumps(record, option=orjson.OPT_INDENT_2) + b"\n")

    def read_config(self) -> dict[str, Any]:
        """Returns what `write_config` wrote: config, command, layout, versions, time.

        Raises:
            UserError: when there is none, or it is damaged.
        """
        try:
            return orjson.loads(self.config_path.read_bytes())
        except (FileNotFoundError, NotADirectoryError) as error:
            raise UserError(
                f"{self.path} is not the folder of a run: it has no config.json; name "
                "one that `tfbig train` made"
            ) from error
        except (OSError, orjson.JSONDecodeError) as error:
            raise UserError(
                f"{self.config_path} cannot be read: {error}; restore it, or name another run"
            ) from error

    def open_metrics(self) -> RecordWriter:
        """Opens metrics.jsonl for appending; for one process at a time."""
        return RecordWriter(self.metrics_path)

    def open_events(self) -> "EventWriter":
        """Opens events.jsonl for appending; for one process at a time."""
        return EventWriter(self.events_path)


class EventWriter(RecordWriter):
    """Appends events: what happened in a run, when and why. Every one is fsynced.

    Args:
        path: events.jsonl; made when missing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, durable=True)

    def write_event(self, event: str, reason: str, **fields: Any) -> None:
        """Appends one event.

        Args:
            event: start, compile, first_step, checkpoint, evaluation, signal, rollback, stop, ...
            reason: why, in words.
            **fields: what else is known of it, such as step.
        """
        self.write({"event": event, "reason": reason, **fields})


def read_metrics(path: str | os.PathLike[str], kind: str = "train") -> list[dict[str, Any]]:
    """Reads the metrics of a run, one record a step.

    After a resume a step may appear twice in the file; the last holds.

    Args:
        path: metrics.jsonl, or the run's folder.
        kind: train or eval.

    Returns:
        The records by step.
    """
    path = Path(path)
    records = read_records(RunFolder(path).metrics_path if path.is_dir() else path)
    by_step = {record["step"]: record for record in records if record["kind"] == kind}
    return [by_step[step] for step in sorted(by_step)]


def read_events(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads the events of a run, in the order in which they happened.

    Args:
        path: events.jsonl, or the run's folder.
    """
    path = Path(path)
    return read_records(RunFolder(path).events_path if path.is_dir() else path)


def foreign_contents(folder: Path) -> str:
    """Returns what makes a folder none of a run, "" for a run's, an empty or a missing one.

    Args:
      folder: may be missing.

    Raises:
      UserError: it cannot be looked into.
    """
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return ""  # whoever makes the folder says what is in the way
    except OSError as error:
        raise UserError(
            f"--run_dir={folder} cannot be looked into: {error.strerror}; change its permissions "
            "or choose another run_dir."
        ) from error
    if not names:
        return ""
    if "manifest.json" in names:
        return "is a data folder or a checkpoint (it has a manifest.json)"
    if _is_config_of_run(folder / "config.json") or _has_checkpoint(folder / "checkpoints"):
        return ""
    foreign = [name for name in names if not _OWN_NAME.fullmatch(name)]
    begun = "checkpoints" in names or "run.lock" in names
    if begun and not foreign:
        return ""
    example = (foreign or names)[0]
    return (
        f"is not empty and not the folder of a run (it has {example!r}, but no run's config.json)"
    )


def _is_config_of_run(path: Path) -> bool:
    try:
        record = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return False
    return isinstance(record, dict) and {"config", "command", "versions"} <= record.keys()


def _has_checkpoint(path: Path) -> bool:
    try:
        return any(_CHECKPOINT.match(entry.name) for entry in path.iterdir())
    except OSError:
        return False


def is_within(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> bool:
    """Returns whether `path` is `folder` or lies in it, links followed."""
    inner = Path(os.path.realpath(os.path.expanduser(path)))
    outer = Path(os.path.realpath(folder))
    return inner == outer or outer in inner.parents


def archive_for_restart(path: str | os.PathLike[str]) -> Path | None:
    """Renames a run's folder `<run_dir>.1`, or `.2` and on where that is taken; deletes nothing.

    Args:
        path: the run's folder.

    Returns:
        Its new name, or None when there was none.

    Raises:
        UserError: when it cannot be renamed, is no run's, or holds the working directory.
    """
    folder = Path(os.path.normpath(RunFolder(path).path))
    if not os.path.lexists(folder):
        return None
    what = foreign_contents(folder) if folder.is_dir() else "is a file"
    if what:
        raise UserError(f"cannot rename {folder}: it {what}; choose another run_dir")
    if is_within(os.curdir, folder):
        raise UserError(
            f"cannot rename {folder}: the working directory is in it; start from elsewhere"
        )
    number = 1
    while os.path.lexists(archive := folder.with_name(f"{folder.name}.{number}")):
        number += 1
    try:
        os.rename(folder, archive)
    except OSError as error:
        raise UserError(
            f"cannot rename {folder} to {archive}: {error.strerror}; choose another run_dir"
        ) from error
    fsync_directory(archive.parent)
    return archive


def installed_versions() -> dict[str, str]:
    """Returns the versions of Python and of the installed packages that a result depends on."""
    versions = {"python": platform.python_version()}
    for name in _VERSIONED_PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
