"""The start of a run: its folder is made, and taken by this job alone; it is introduced."""

import contextlib
from collections.abc import Sequence
from typing import Any

from tfbig.config import Config, count_parameters
from tfbig.errors import UserError
from tfbig.loop import Progress
from tfbig.run_folder import RunFolder, archive_for_restart
from tfbig.run_lock import RunLock
from tfbig.run_state import check_resumable, check_room
from tfbig.schedule import slice_rows
from tfbig.variables import is_adapter, num_trained_parameters


def check_kept_run(config: Config, folder: RunFolder, num_replicas: int) -> None:
    """Checks that the run's folder can be made, or holds this run.

    Args:
      config: the run.
      folder: its folder.
      num_replicas: of the run.

    Raises:
      UserError: it can't be written to, or its newest checkpoint is of another run.
    """
    folder.check_can_be_made()
    check_resumable(config, folder, num_replicas)


def make_run_folder(
    config: Config, folder: RunFolder, trainer: Any, patience: float = 0.0
) -> contextlib.AbstractContextManager:
    """Has rank 0 make the run's folder and hold its lock; with --restart the old one is renamed.

    Args:
      config: the run.
      folder: its folder.
      trainer: its `rank` and `agree` are used.
      patience: seconds in which another rank 0 may still let go of the lock.

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
            _take_run_folder(config, folder, held, patience)
        except UserError as failure:
            held.close()
            error = failure
    if trainer.agree(int(error is not None), "max"):
        held.close()
        raise error or UserError(f"rank 0 could not make {folder.path}")
    return held


def _take_run_folder(
    config: Config, folder: RunFolder, held: contextlib.ExitStack, patience: float
) -> None:
    check_room(config, folder)
    if config.run.restart:
        if folder.path.is_dir():
            held.enter_context(RunLock(folder.path))  # it goes with the folder
        archive = archive_for_restart(folder.path)
        if archive is not None:
            print(f"{folder.path} is now {archive}", flush=True)
    folder.create()
    lock = held.enter_context(RunLock(folder.path, patience))
    if lock.note:
        print(lock.note, flush=True)


def introduce(
    config: Config, trainer: Any, data: Any, peak: float, peak_source: str, notes: Sequence[str]
) -> None:
    """Prints what is about to be trained."""
    run, parallel = config.run, config.parallel
    num_parameters = count_parameters(config.model)
    num_trained = num_trained_parameters(config.model, config.optimizer.freeze)
    trained = f" ({num_trained:,} trained)" if num_trained < num_parameters else ""
    forwards = trainer.num_replicas * parallel.microbatches
    microbatch = slice_rows(run.global_batch, trainer.num_replicas, parallel.microbatches)
    microbatch //= parallel.microbatches
    filled = forwards * microbatch - run.global_batch
    print(
        f"{run.preset}: {num_parameters:,} parameters{trained}, {parallel.precision}, "
        f"{config.data.sequence_length} tokens a sample\n"
        f"{parallel.strategy}: {trainer.size} processes, {trainer.num_replicas} replicas; "
        f"global batch {run.global_batch} = {trainer.num_replicas} replicas x "
        f"{parallel.microbatches} microbatches x {microbatch} samples"
        f"{f' - {filled} that fill up' if filled else ''}\n"
        f"{data.num_rows('train'):,} training samples from {', '.join(data.sources)}; "
        f"peak {peak / 1e9:,.0f} GFLOP/s ({peak_source})\n"
        f"run folder {run.run_dir}",
        flush=True,
    )
    layout = trainer.layout()
    if layout is not None:
        print(layout.table, flush=True)
    for note in notes:
        print(note, flush=True)


def start_from(keeper: Any, reader: Any, initial: Any, trainer: Any) -> Any:
    """Fills a built trainer from a checkpoint, or from another run's; returns the progress."""
    if reader is not None:
        return keeper.load(reader)
    if initial is not None:
        initialise_from(initial, trainer)
    return Progress(0, 0)


def recent_losses(reader: Any) -> Any:
    """Returns the losses that a checkpoint keeps for judging the next ones."""
    return reader.manifest["metadata"].get("recent_losses", ()) if reader is not None else ()


def initialise_from(reader: Any, trainer: Any) -> None:
    """Fills the weights from another run's checkpoint; the optimizer stays fresh."""
    missing = trainer.load_state(reader, weights_only=True)
    adapters = [path for path in missing if is_adapter(path)]
    named = [path for path in missing if path not in adapters]
    if adapters:
        named.append(f"{len(adapters)} variables of adapters (lora_a, lora_b)")
    if named and trainer.rank == 0:
        print(
            f"{reader.directory} lacks {', '.join(named)}: they keep their initial values",
            flush=True,
        )
