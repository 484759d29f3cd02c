"""Saving a checkpoint: each rank writes its part, rank 0 merges the parts into a manifest.

The manifest's rename is the one moment at which a checkpoint begins to exist, or at which a new
save of a step replaces an old one. It is right at every crash because no file that a manifest
names is ever written again:

- A rank numbers its part by the first free one of rank, rank + num_ranks, ...; a part's file is
  created exclusively. So a save of a step that exists stands beside the old one until the new
  manifest, naming the new files, has replaced the old manifest.
- A part is fsynced before its part-NNNNN.json is renamed into place, which says its digest, and
  the attempt it belongs to: a token that all ranks of one save have in common and no other save
  has. Rank 0 merges parts of its own attempt only, whatever earlier saves left behind.
- What earlier attempts left is removed by the rank whose numbers it has, before it writes, and by
  rank 0, once the manifest is there.

Nothing here communicates between ranks but by these files, so that it can run in any thread.
"""

import os
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

from tfbig.checkpoint_format import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    CheckpointError,
    RunState,
    Slice,
    our_files,
    step_directory_name,
)
from tfbig.checkpoint_part import describe_slices, merge_variables
from tfbig.durable_file import (
    FileDigest,
    digest_problem,
    fsync_directory,
    unlink_quietly,
    write_atomic,
)
from tfbig.safetensors_file import write_tensors

_SLOWEST_POLL_SECONDS = 0.5


class CheckpointWriter:
    """Saves the checkpoints of one rank.

    Args:
        checkpoints_dir: the run's folder of checkpoints, shared by all ranks; made when missing.
        rank: this process.
        num_ranks: processes that save together; every one of them must call `save`.
        timeout_seconds: how long rank 0 waits for the others' parts after its own.

    Example:
        >>> writer = CheckpointWriter("run/checkpoints", rank=0, num_ranks=1)
        >>> writer.save(1000, trainer.state_slices(), RunState(consumed_samples=64000))
    """

    def __init__(
        self,
        checkpoints_dir: str | os.PathLike[str],
        rank: int = 0,
        num_ranks: int = 1,
        timeout_seconds: float = 600.0,
    ) -> None:
        assert 0 <= rank < num_ranks, f"rank {rank} of {num_ranks}"
        self.checkpoints_dir = Path(checkpoints_dir)
        self.rank = rank
        self.num_ranks = num_ranks
        self.timeout_seconds = timeout_seconds
        self._failed_steps: set[int] = set()

    def save(
        self, step: int, slices: Iterable[Slice], run_state: RunState, attempt: str | None = None
    ) -> Path:
        """Saves this rank's slices; on rank 0, returns when the checkpoint is complete.

        Arrays are turned into numpy arrays one at a time. Slices of which this rank is not the
        writer are not looked at, but make sure that some rank is.

        Args:
            step: optimizer updates made.
            slices: what this rank holds; a path may occur several times.
            run_state: the manifest's other fields; rank 0's are used.
            attempt: the token of this save, the same on all ranks and of no earlier save;
                a single rank may leave it out.

        Returns:
            The step's directory.

        Raises:
            CheckpointError: when a part cannot be written or is missing, or when the slices of
                all ranks don't tile each variable once. Earlier checkpoints are intact, one of
                the same step included.
        """
        if attempt is None:
            assert self.num_ranks == 1, "several ranks need an attempt they agree on"
            attempt = uuid.uuid4().hex
        directory = self.checkpoints_dir / step_directory_name(step)
        try:
            self._write_part(step, directory, list(slices), attempt)
            if self.rank == 0:
                parts = self._collect_parts(step, directory, attempt)
                self._commit(step, directory, parts, run_state, attempt)
        except BaseException as error:
            self._failed_steps.add(step)
            if self.rank == 0:  # nobody else can complete it: the room it took is free again
                _remove_unnamed(directory)
            if isinstance(error, OSError):
                raise CheckpointError(
                    f"checkpoint of step {step} not saved: {error}. Earlier checkpoints are intact"
                ) from error
            raise
        return directory

    def wait_until_complete(self, step: int, attempt: str) -> None:
        """Waits on any rank until rank 0 has completed a save.

        Args:
            step: as given to `save`.
            attempt: as given to `save`.

        Raises:
            CheckpointError: when that takes longer than timeout_seconds.
        """
        path = self.checkpoints_dir / step_directory_name(step) / MANIFEST_NAME
        seen = None
        for _ in _polls(self.timeout_seconds):
            try:
                stat = os.stat(path)
                if (stat.st_ino, stat.st_mtime_ns) != seen:
                    seen = (stat.st_ino, stat.st_mtime_ns)
                    if orjson.loads(path.read_bytes())["attempt"] == attempt:
                        return
            except FileNotFoundError:
                continue
        raise CheckpointError(
            f"checkpoint of step {step}: rank 0 wrote no {MANIFEST_NAME} within "
            f"{self.timeout_seconds:g} s; its own message says why"
        )

    def _write_part(self, step: int, directory: Path, slices: list[Slice], attempt: str) -> None:
        self._make_directory(directory)
        number = self._free_number(directory)
        part_path = directory / f"part-{number:05d}.safetensors"
        json_path = directory / f"part-{number:05d}.json"
        part: dict[str, Any] = {"attempt": attempt, "rank": self.rank, "files": {}}
        try:
            part["variables"], tensors = describe_slices(slices, part_path.name)
            slices.clear()  # the arrays are now in tensors only, which lets go of each once written
            if tensors:
                header = {"format": "tfbig", "step": str(step), "attempt": attempt}
                digest = write_tensors(part_path, tensors, header)
                part["files"] = {part_path.name: _file_entry(digest)}
            write_atomic(json_path, orjson.dumps(part))
        except Exception as error:
            # The others learn it from this file, where there is room for it, without waiting.
            unlink_quietly(part_path)
            report = {"attempt": attempt, "rank": self.rank, "error": str(error)}
            try:
                write_atomic(json_path, orjson.dumps(report))
            except OSError:
                pass
            raise

    def _make_directory(self, directory: Path) -> None:
        missing = [path for path in (directory, *directory.parents) if not path.exists()]
        for path in reversed(missing):
            try:
                os.mkdir(path)
            except FileExistsError:  # another rank was faster
                pass
            fsync_directory(path.parent)

    def _free_number(self, directory: Path) -> int:
        """Removes what earlier attempts left under this rank's numbers; returns the first free."""
        files, named = our_files(directory), _named_files(directory)
        taken = set()
        for name, number in files.items():
            if number is not None and number % self.num_ranks == self.rank:
                if named is None or name in named:
                    taken.add(number)
                else:
                    os.unlink(directory / name)
        number = self.rank
        while number in taken:
            number += self.num_ranks
        return number

    def _collect_parts(self, step: int, directory: Path, attempt: str) -> list[dict[str, Any]]:
        """Waits for every rank's part-NNNNN.json of this attempt; returns them by rank."""
        parts: dict[int, dict[str, Any]] = {}
        accepted: set[str] = set()
        for _ in _polls(self.timeout_seconds):
            for name in our_files(directory):
                if not name.endswith(".json") or name == MANIFEST_NAME or name in accepted:
                    continue
                try:
                    part = orjson.loads((directory / name).read_bytes())
                except FileNotFoundError:
                    continue  # of an earlier attempt, removed meanwhile
                if part["attempt"] == attempt:
                    accepted.add(name)
                    parts[part["rank"]] = part
            for rank, part in sorted(parts.items()):
                if "error" in part:
                    raise CheckpointError(
                        f"checkpoint of step {step} not saved: rank {rank} could not write its "
                        f"part: {part['error']}. Earlier checkpoints are intact"
                    )
            if len(parts) == self.num_ranks:
                return [parts[rank] for rank in range(self.num_ranks)]
        missing = sorted(set(range(self.num_ranks)) - set(parts))
        raise CheckpointError(
            f"checkpoint of step {step} not saved: no part of rank "
            f"{', '.join(map(str, missing))} appeared in {directory} within "
            f"{self.timeout_seconds:g} s. See whether the rank is alive and the folder is "
            f"shared by all hosts; earlier checkpoints are intact"
        )

    def _commit(
        self,
        step: int,
        directory: Path,
        parts: list[dict[str, Any]],
        run_state: RunState,
        attempt: str,
    ) -> None:
        files = {name: entry for part in parts for name, entry in part["files"].items()}
        manifest = {
            "format_version": FORMAT_VERSION,
            "step": step,
            "consumed_samples": run_state.consumed_samples,
            "seeds": run_state.seeds,
            "loss_scale": run_state.loss_scale,
            "config": run_state.config,
            "tokenizer_sha256": run_state.tokenizer_sha256,
            "data": run_state.data,
            "metadata": run_state.metadata,
            "attempt": attempt,
            "num_ranks": self.num_ranks,
            "files": files,
            "variables": merge_variables(step, parts),
        }
        replaces = (directory / MANIFEST_NAME).exists()
        for name, entry in files.items():
            digest = FileDigest(entry["sha256"], entry["bytes"])
            # A whole read-back only where the old checkpoint goes by this very rename.
            if replaces:
                problem = digest_problem(directory / name, digest)
            else:
                problem = _size_problem(directory / name, digest.num_bytes)
            if problem:
                raise CheckpointError(f"checkpoint of step {step} not saved: {problem}")
        write_atomic(
            directory / MANIFEST_NAME,
            orjson.dumps(manifest, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY),
        )
        self._remove_leftovers(step, directory)

    def _remove_leftovers(self, step: int, directory: Path) -> None:
        """Removes old parts of this step, and what failed saves of other steps left.

        Every rank has published its part of this save, and a rank's saves come one after the
        other: so none is still writing an earlier one.
        """
        _remove_unnamed(directory)
        for failed_step in self._failed_steps - {step}:
            remove_incomplete(self.checkpoints_dir / step_directory_name(failed_step))
        self._failed_steps.clear()


def remove_incomplete(directory: Path) -> bool:
    """Removes a step's directory that has no manifest; files which aren't tfbig's stay.

    Args:
        directory: a step's directory that no rank is saving to.

    Returns:
        Whether it is gone; False for a complete checkpoint.
    """
    if (directory / MANIFEST_NAME).exists():
        return False
    try:
        for name in our_files(directory):
            unlink_quietly(directory / name)
        os.rmdir(directory)
    except FileNotFoundError:
        return True
    except OSError:  # not empty, or not ours to remove
        return False
    return True


def _named_files(directory: Path) -> set[str] | None:
    """Returns the files a manifest names; none without one, None when it is damaged."""
    try:
        return set(orjson.loads((directory / MANIFEST_NAME).read_bytes())["files"])
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remove_unnamed(directory: Path) -> None:
    """Removes our files that the manifest doesn't name; none when it cannot be read."""
    named = _named_files(directory)
    if named is None or not directory.is_dir():
        return
    for name in our_files(directory):
        if name != MANIFEST_NAME and name not in named:
            unlink_quietly(directory / name)


def _size_problem(path: Path, num_bytes: int) -> str | None:
    found = os.stat(path).st_size
    if found != num_bytes:
        return f"{path} has {found} bytes where its writer wrote {num_bytes}"
    return None


def _file_entry(digest: FileDigest) -> dict[str, Any]:
    return {"sha256": digest.sha256, "bytes": digest.num_bytes}


def _polls(timeout_seconds: float) -> Iterable[None]:
    """Yields at growing intervals until the time is over, and once more then."""
    deadline = time.monotonic() + timeout_seconds
    pause = 0.005
    while True:
        over = time.monotonic() >= deadline
        yield
        if over:
            return
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(2 * pause, _SLOWEST_POLL_SECONDS)
