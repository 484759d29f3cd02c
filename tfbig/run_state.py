"""Saving a run's state and finding it again: what a checkpoint says besides the variables."""

import functools
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfbig.checkpoint import (
    compare_for_resume,
    flatten_fields,
    free_disk_error,
    latest,
    list_checkpoints,
    newest_that_verifies,
    prune,
    remove_leftovers,
)
from tfbig.checkpoint_format import RunState, Slice, num_bytes_to_write
from tfbig.checkpoint_reader import CheckpointReader
from tfbig.checkpoint_writer import CheckpointWriter
from tfbig.config import Config, to_dict
from tfbig.errors import UserError
from tfbig.hardware import steps_overlap
from tfbig.host_memory import HostCopy
from tfbig.loop import Progress
from tfbig.run_folder import RunFolder
from tfbig.saving import Saved, Saving
from tfbig.shared_folder import sees_rank_0
from tfbig.together import raise_together, together
from tfbig.variables import checkpoint_bytes

# A resume may change how a run is executed, how long it is and what is logged; the rest is the
# run's identity.
MAY_DIFFER = (
    "parallel.*",
    "profile.*",
    "robustness.*",
    "run.preset",
    "run.run_dir",
    "run.steps",
    "run.eval_every",
    "run.checkpoint_every",
    "run.keep_last",
    "run.keep_best",
    "run.log_every",
    "run.layer_grad_norms",
    "run.tensorboard",
    "run.max_loss",
    "run.restart",
    "run.verify",
    "run.init_from",
    "data.data",
    "data.source",
    "data.data_workers",
)
# Of the parallel section, what the numbers depend on must match all the same.
MUST_MATCH = ("parallel.precision",)
# Fields that earlier versions' checkpoints lack, with the value that their runs had.
ADDED_SINCE = {
    "model.lora_rank": 0,
    "model.lora_alpha": 16.0,
    "optimizer.freeze": (),
    "loss.z_loss": 0.0,
    "loss.label_smoothing": 0.0,
}
_REPLICAS = "optimizer.scale_learning_rate.num_replicas"
SAVE_TIMEOUT = 1800.0  # seconds that rank 0 waits for the other ranks' parts
_FAILED_RUN_PATIENCE = 5.0  # seconds in which a save under way may end when the run fails


def identity(config: Config, data_identity: dict[str, Any], num_replicas: int) -> dict[str, Any]:
    """Returns, flat, what must not change between a save and a resume.

    Args:
      config: the run.
      data_identity: hashes of manifest, tokenizer and mixture.
      num_replicas: of the run, by which --scale_learning_rate multiplies; else any number goes on.
    """
    flat = flatten_fields(to_dict(config)) | flatten_fields({"data": data_identity})
    if config.optimizer.scale_learning_rate:
        flat[_REPLICAS] = num_replicas
    return {
        name: value
        for name, value in flat.items()
        if (name in MUST_MATCH or not _may_differ(name)) and value != ADDED_SINCE.get(name)
    }


def _may_differ(name: str) -> bool:
    section = name.partition(".")[0]
    return name in MAY_DIFFER or f"{section}.*" in MAY_DIFFER


def check_room(config: Config, folder: RunFolder) -> None:
    """Checks, before a run begins, that its first checkpoint will find room.

    Raises:
      UserError: with the numbers.
    """
    error = free_disk_error(folder.checkpoints_dir, checkpoint_bytes(config))
    if error:
        raise UserError(error)


def check_resumable(config: Config, folder: RunFolder, num_replicas: int) -> None:
    """Checks, before data are opened or made, that the run is the one its newest checkpoint is of.

    What needs the data, their hashes, is compared when the checkpoint is read. A checkpoint that
    cannot be read is not judged here.

    Args:
      config: the run.
      folder: its folder.
      num_replicas: of the run.

    Raises:
      UserError: field by field.
    """
    info = latest(folder.checkpoints_dir)
    if info is None or config.run.restart:
        return
    try:
        saved = CheckpointReader(info.path).manifest["metadata"].get("identity", {})
    except UserError:
        return
    if not saved:
        return
    here = identity(config, {}, num_replicas)
    here.pop("data")  # no hashes yet
    _raise_differences(folder, {name: saved[name] for name in saved if name in here}, here)


def _raise_differences(folder: RunFolder, saved: dict[str, Any], here: dict[str, Any]) -> None:
    lines = compare_for_resume(saved, here, ())
    if lines:
        raise UserError(
            f"cannot resume {folder.path}: {'; '.join(lines)}. Use the run's own "
            "values, another --run_dir, or --restart."
        )


class StateKeeper:
    """Saves and finds the checkpoints of one run.

    Args:
      config: the run.
      folder: its folder.
      trainer: built before `save` or `load`.
      data_identity: consumed samples -> what names the data up to there: the hashes of manifest,
        tokenizer and the mixture's segments that have begun.
    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        trainer: Any,
        data_identity: Callable[[int], dict[str, str]],
    ) -> None:
        self._config, self._folder, self._trainer = config, folder, trainer
        self._data_identity = data_identity
        # Ranks that may be lost at any time are not waited for: rank 0 holds all, and writes all.
        self._is_alone = config.robustness.elastic
        rank, size = (0, 1) if self._is_alone else (trainer.rank, trainer.size)
        self._writer = CheckpointWriter(folder.checkpoints_dir, rank, size, SAVE_TIMEOUT)
        self._copy = HostCopy(keeps_room=not steps_overlap())
        self._saving: Saving | None = None
        self._finished: list[Saved] = []
        self._noted: set[str] = set()

    def find(self) -> tuple[CheckpointReader | None, list[str]]:
        """Returns the newest checkpoint that is intact, and a line for each newer one that isn't.

        Rank 0 looks and clears what interrupted saves left; the others take its answer.

        Raises:
          UserError: on every rank: there are checkpoints but none is intact, or the newest belongs
            to a run with another identity.
        """
        step, notes = together(self._trainer, self._newest)
        step = int(self._trainer.broadcast(np.array([step], np.int64))[0])
        if step < 0:
            return None, notes
        return together(self._trainer, lambda: self._checked_reader(step)), notes

    def _newest(self) -> tuple[int, list[str]]:
        """Returns, on rank 0, the step of the newest intact checkpoint and what newer ones lack."""
        if self._trainer.rank != 0:
            return -1, []
        remove_leftovers(self._folder.checkpoints_dir)
        info, rejected = newest_that_verifies(self._folder.checkpoints_dir)
        notes = [f"step {bad.step} is damaged: {why}" for bad, why in rejected]
        if info is None and rejected:
            raise UserError(f"no checkpoint is intact: {notes[0]}. Use --restart to start anew.")
        return -1 if info is None else info.step, notes

    def _checked_reader(self, step: int) -> CheckpointReader:
        reader = self._reader_of(step)
        self._check_identity(reader)
        return reader

    def find_before(self, step: int) -> CheckpointReader | None:
        """Returns the newest intact checkpoint from before a step is made; changes nothing.

        Args:
          step: counted from 1.

        Raises:
          UserError: on every rank: the checkpoint belongs to a run with another identity.
        """
        newest = together(self._trainer, lambda: self._newest_before(step))
        newest = int(self._trainer.broadcast(np.array([newest], np.int64))[0])
        if newest < 0:
            return None
        return together(self._trainer, lambda: self._checked_reader(newest))

    def _newest_before(self, step: int) -> int:
        """Returns, on rank 0, the newest intact checkpoint's step below another; else -1."""
        if self._trainer.rank != 0:
            return -1
        for info in reversed(list_checkpoints(self._folder.checkpoints_dir)):
            if info.step < step and not CheckpointReader(info.path).problems():
                return info.step
        return -1

    def load_newest(self) -> Progress | None:
        """Goes back to the newest intact checkpoint; None where there is none."""
        reader, _ = self.find()
        return None if reader is None else self.load(reader)

    def _reader_of(self, step: int) -> CheckpointReader:
        for info in list_checkpoints(self._folder.checkpoints_dir):
            if info.step == step:
                return CheckpointReader(info.path)
        raise UserError(
            f"step {step} is not to be seen in "
            f"{self._folder.checkpoints_dir}: --run_dir must be on a file system that all hosts "
            "share."
        )

    def _check_identity(self, reader: CheckpointReader) -> None:
        saved = reader.manifest["metadata"].get("identity", {})
        data = self._data_identity(int(reader.manifest["consumed_samples"]))
        _raise_differences(self._folder, saved, self._identity(data))

    def _identity(self, data: dict[str, str]) -> dict[str, Any]:
        return identity(self._config, data, self._trainer.num_replicas)

    def load(self, reader: CheckpointReader) -> Progress:
        """Fills the trainer from a checkpoint and returns where it stood."""
        self._trainer.load_state(reader)
        return Progress(reader.step, reader.manifest["consumed_samples"])

    def save(self, progress: Progress, metadata: dict[str, Any]) -> None:
        """Begins a checkpoint, together with all other ranks.

        It returns when the state's values are held in host memory; `finished` says when the
        checkpoint is complete. Without that memory, or without --async_checkpoints, it is
        complete at once. An earlier save that is still under way is waited for.

        Raises:
          UserError: on every rank, when one has no room for it.
          CheckpointError: the earlier save has failed.
        """
        start = time.perf_counter()
        slices = list(self._trainer.state_slices())
        # All ranks write to one file system, which `check_shared` saw to.
        num_bytes = self._trainer.agree(num_bytes_to_write(slices), "sum")
        error = free_disk_error(self._folder.checkpoints_dir, num_bytes)
        raise_together(self._trainer, error)
        if self._saving is not None:  # it uses the same room in host memory
            self._finished.append(self._saving.result())
            self._saving = None
        token = uuid.uuid4().int & (2**62 - 1)
        attempt = str(int(self._trainer.broadcast(np.array([token], np.int64))[0]))
        if self._is_alone and self._trainer.rank:
            return
        state = self._run_state(progress, metadata, slices)
        is_copied = self._can_copy(slices)
        if is_copied:
            slices = self._copy.look(slices)
        write = functools.partial(self._write, progress.step, slices, state, attempt, is_copied)
        if is_copied:
            self._saving = Saving(progress.step, write, start)
        else:
            write()
            self._finished.append(Saved(progress.step, time.perf_counter() - start))

    def finished(self, wait: bool = False) -> list[Saved]:
        """Returns the checkpoints completed since the last call.

        Args:
          wait: whether to wait for one that is under way, on all ranks, which all call it: rank 0
            has more to do than the others, and what ends first has the launcher end the rest.

        Raises:
          CheckpointError: it could not be written.
        """
        if self._saving is not None and (wait or self._saving.is_done):
            saving, self._saving = self._saving, None
            self._finished.append(saving.result())
        if wait:
            self._trainer.agree(0, "max")
        done, self._finished = self._finished, []
        return done

    def __enter__(self) -> "StateKeeper":
        return self

    def __exit__(self, *_: object) -> None:
        if self._saving is not None:  # only when the run fails
            self._saving.wait_at_most(_FAILED_RUN_PATIENCE)

    def _can_copy(self, slices: Sequence[Slice]) -> bool:
        if not self._config.robustness.async_checkpoints:
            return False
        problem = self._copy.problem(slices)
        if problem and problem not in self._noted:
            self._noted.add(problem)
            print(
                f"rank {self._trainer.rank}: {problem}: training waits while this checkpoint is "
                "written",
                flush=True,
            )
        return problem is None

    def _run_state(
        self, progress: Progress, metadata: dict[str, Any], slices: Sequence[Slice]
    ) -> RunState:
        config, data = self._config, self._data_identity(progress.consumed_samples)
        return RunState(
            consumed_samples=progress.consumed_samples,
            seeds={"run": config.run.seed},
            loss_scale=loss_scale_of(slices),
            config=to_dict(config),
            tokenizer_sha256=data.get("tokenizer_sha256"),
            data=data,
            metadata={**metadata, "identity": self._identity(data)},
        )

    def _write(
        self, step: int, slices: list[Slice], state: RunState, attempt: str, is_copied: bool
    ) -> None:
        """Writes this rank's part and waits for the whole; rank 0 then deletes old checkpoints."""
        if is_copied:
            slices = self._copy.take(slices)
        self._writer.save(step, slices, state, attempt)
        self._writer.wait_until_complete(step, attempt)
        if self._trainer.rank == 0:
            prune(
                self._folder.checkpoints_dir,
                keep_last=self._config.run.keep_last,
                keep_every=self._config.robustness.keep_every,
                keep_best=int(self._config.run.keep_best),
            )


def loss_scale_of(slices: Sequence[Slice]) -> float | None:
    """Returns float16's loss scale from the state that is saved; None without one."""
    for part in slices:
        if part.path == "optimizer/loss_scale":
            return float(np.asarray(part.array))
    return None


def check_shared(folder: RunFolder, trainer: Any, patience: float = 5.0) -> None:
    """Checks that all ranks see the run folder that rank 0 made.

    Args:
      folder: created by rank 0.
      trainer: its `rank`, `agree` and `broadcast` are used.
      patience: seconds to wait for a network file system to show a new file.

    Raises:
      UserError: on every rank, when one doesn't see what rank 0 wrote.
    """
    sees = sees_rank_0(trainer, folder.path, patience)
    blind = trainer.agree(-1 if sees else trainer.rank, "max")
    if blind >= 0:
        if trainer.rank == 0:
            folder.remove_if_empty()
        raise UserError(
            f"rank {blind} does not see {folder.path}, which rank 0 made: --run_dir must be on a "
            "file system that all hosts share."
        )
