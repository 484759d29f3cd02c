"""A run through worlds of ranks: each of them is a life of the process, which begins by exec(2).

A process that goes on in another world begins anew, because Horovod and Gloo don't dependably do
so twice in one process (a failed start aborts it; see github.com/horovod/horovod/issues/3264), and
because what TensorFlow, threads and GPUs hold is then gone for certain. Its process id, its pipes
and its launcher stay, and what it knows of the run is kept in memory.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from tfbig.checkpoint import latest
from tfbig.checkpoint_format import num_bytes_to_write
from tfbig.command import BEGAN_VARIABLE
from tfbig.config import Config, replace_fields
from tfbig.elastic.launcher import Launcher
from tfbig.elastic.received_state import received
from tfbig.elastic.refusals import check_elastic
from tfbig.elastic.standing import Standing, keep, kept_files, let_go, rewrite, take
from tfbig.errors import RunError, UserError, WorldChanged
from tfbig.host_memory import memory_problem
from tfbig.lost_host import is_engine_error
from tfbig.run_folder import RunFolder
from tfbig.schedule import slice_rows
from tfbig.stop_signal import STOP

_START_SECONDS = 300.0  # in which all ranks of a world import TensorFlow, from a slow disk too
_WAIT_SECONDS = 1800.0  # for a new world, where --hang_timeout sets no limit
_LOCK_SECONDS = 120.0  # in which a lost host's hold on the run's folder ends
_MAX_FRUITLESS = 5


class World:
    """The one world of a run whose ranks are fixed in number."""

    @property
    def lock_patience(self) -> float:
        """Seconds in which an earlier rank 0 may still let go of the run's folder."""
        return 0.0

    def meet(self) -> None:
        """Waits until all ranks are about to start the engine."""

    def settle(self, config: Config, trainer: Any) -> Config:
        """Returns the configuration of this world; every rank calls it."""
        return config

    def find(self, trainer: Any, keeper: Any) -> tuple[Any, list[str]]:
        """Returns the reader of the state to go on from, or None, and remarks to print."""
        return keeper.find()

    def announce(self, folder: RunFolder, trainer: Any) -> None:
        """Says what has changed; on rank 0."""

    def hooks(self) -> list[Any]:
        """Returns what watches the run for the next world."""
        return []

    @contextlib.contextmanager
    def trained_in(self, trainer: Any, loop: Any) -> Iterator[bool]:
        """Is entered around the loop, with the state in the trainer.

        Yields:
          Whether the evaluation and the checkpoint of the step where the run stands are due.
        """
        yield False


class ElasticWorld(World):
    """One of the worlds of an elastic run.

    Args:
      config: the run.
      launcher: of this process.
    """

    def __init__(self, config: Config, launcher: Launcher) -> None:
        self._config, self._launcher = config, launcher
        self._folder = RunFolder(config.run.run_dir)
        self._kept = take(os.environ)
        self._standing = Standing() if self._kept is None else self._kept.standing
        self._came_from: Standing | None = None  # where the run stood before this world
        self._records: Any = None  # NewestRecords, once TensorFlow is there
        self._slices: list[Any] = []
        self._is_later = False  # whether there was a world before this one
        self._size = 0

    def enter(self) -> bool:
        """Finds the place in the world; returns whether there is one for this process."""
        self._launcher.listen()
        if self._kept is not None:  # else the launcher has started it for a place
            place = self._launcher.ask_place(self._config.robustness.hang_timeout or _WAIT_SECONDS)
            if place.rank < 0:
                return False
            place.enter_into(os.environ)
        self._size = int(os.environ["HOROVOD_SIZE"])
        return True

    @property
    def lock_patience(self) -> float:
        return _LOCK_SECONDS if self._is_later else 0.0

    def meet(self) -> None:
        self._launcher.meet(int(os.environ["HOROVOD_RANK"]), self._size, _START_SECONDS)

    def settle(self, config: Config, trainer: Any) -> Config:
        run, standing = config.run, self._standing
        asked = slice_rows(run.global_batch, trainer.data_size, config.parallel.microbatches)
        # Another world's microbatches stay as large as they were: they must fit into memory.
        rows = trainer.agree(standing.microbatch_rows, "max")
        rows = standing.microbatch_rows = rows or asked // config.parallel.microbatches
        self._is_later = bool(trainer.agree(standing.num_worlds, "max"))
        standing.has_folder = bool(trainer.agree(int(standing.has_folder), "max"))
        microbatches = -(-slice_rows(run.global_batch, trainer.data_size, 1) // rows)
        trainer.set_microbatches(microbatches)
        restart = run.restart and not standing.has_folder
        return replace_fields(config, {"microbatches": microbatches, "restart": restart})

    def find(self, trainer: Any, keeper: Any) -> tuple[Any, list[str]]:
        self._standing.has_folder = True  # it is made before a state is looked for
        state = received(trainer, self._kept)
        if state is None:
            return keeper.find()
        self._came_from = state.standing
        newest = latest(self._folder.checkpoints_dir) if trainer.rank == 0 else None
        is_saved = trainer.agree(int(newest is not None and newest.step == state.step), "max")
        if state.step == self._config.run.steps and not is_saved:  # rank 0 was lost at the end
            self._came_from.owes_pause = True
        return state, []

    def announce(self, folder: RunFolder, trainer: Any) -> None:
        before = self._came_from
        if before is None:
            return
        with folder.open_metrics() as metrics:
            written = _last_step(folder)
            for record in before.records:
                if written < record["step"] <= before.step:
                    metrics.write(record)
        with contextlib.closing(folder.open_events()) as events:
            sizes = {"previous_world_size": before.world_size, "world_size": trainer.size}
            seconds = time.time() - before.left_at
            events.write_event("world", before.reason, step=before.step, seconds=seconds, **sizes)
        print(
            f"step {before.step:>6}  world of size {trainer.size} after one of "
            f"{before.world_size}, {seconds:.0f} s later: {before.reason}",
            flush=True,
        )

    def hooks(self) -> list[Any]:
        from tfbig.elastic.newest_records import NewestRecords

        self._records = NewestRecords()
        return [self._records]

    @contextlib.contextmanager
    def trained_in(self, trainer: Any, loop: Any) -> Iterator[bool]:
        owes_pause = self._came_from is not None and self._came_from.owes_pause
        self._records.newest = list(self._came_from.records) if self._came_from else []
        let_go(os.environ)  # all ranks have the state by now
        self._kept = None
        self._launcher.tell(loop.stop_signal.ask_reshape)
        if self._standing.is_stopping:
            loop.stop_signal.request("a signal before the last change of the world")
        try:
            yield owes_pause
        except Exception as error:
            if not is_change(error):
                raise
            progress = loop.settle()
            standing = self._standing
            standing.step, standing.consumed_samples = progress
            standing.owes_pause = loop.owes_pause
            standing.is_stopping = loop.stop_signal.value >= STOP
            standing.recent_losses = loop.bad_steps.losses()
            standing.records = self._records.newest
            self._slices = list(trainer.state_slices())
            raise

    def leave(self, error: Exception) -> NoReturn:
        """Begins the process anew for the next world.

        Raises:
          RunError: too many worlds in a row have made no step.
        """
        standing = self._standing
        standing.num_worlds += 1
        has_stepped = self._records is not None and self._records.has_any
        standing.num_fruitless = 0 if has_stepped else standing.num_fruitless + 1
        if standing.num_fruitless > _MAX_FRUITLESS:
            raise RunError(
                f"{standing.num_fruitless} worlds in a row have made no step; the last one ended "
                f"with: {error}"
            ) from error
        rank = int(os.environ["HOROVOD_RANK"])
        standing.world_size, standing.left_at = self._size, time.time()
        standing.reason = reason_of(error)
        where = f"step {standing.step}" if standing.step >= 0 else "the newest checkpoint"
        print(
            f"tfbig train: rank {rank} of {self._size} goes on in a new world from {where}: "
            f"{standing.reason}",
            file=sys.stderr,
        )
        if self._kept is None:
            self._keep()
        else:  # it was left before all ranks had the state
            rewrite(standing, os.environ)
        _begin_anew()

    def _keep(self) -> None:
        problem = memory_problem(num_bytes_to_write(self._slices))
        if problem and self._slices:
            print(f"{problem}: the newest checkpoint is gone on from", file=sys.stderr)
            self._standing.step, self._slices = -1, []
        keep(self._standing, self._slices, os.environ)


def run_in_worlds(config: Config, run: Callable[[Config, World], int]) -> int:
    """Runs a training in the world of its ranks, or in one world after another.

    Args:
      config: of the run.
      run: trains in one world, and leaves nothing open when it raises.

    Returns:
      The exit code.
    """
    if not config.robustness.elastic:
        return run(config, World())
    check_elastic(config, os.environ)
    world = ElasticWorld(config, Launcher(os.environ))
    if not world.enter():
        print("tfbig train: the new world is without this rank, which ends", flush=True)
        return 0
    try:
        return run(config, world)
    except Exception as error:
        if not is_change(error):
            raise
        world.leave(error)


def is_change(error: BaseException | None) -> bool:
    """Returns whether an error says that ranks were lost or are to change, at any remove."""
    while error is not None:
        if isinstance(error, WorldChanged):
            return True
        if is_engine_error(error) and not isinstance(error, UserError):
            return True
        error = error.__cause__
    return False


def reason_of(error: Exception) -> str:
    """Returns why a world was left, in one line."""
    if isinstance(error, WorldChanged | RunError):
        return str(error)
    return "a rank was lost"


def _last_step(folder: RunFolder) -> int:
    from tfbig.run_folder import read_metrics

    return max((record["step"] for record in read_metrics(folder.metrics_path)), default=0)


def _begin_anew() -> NoReturn:
    """Runs this process's command again in the same process."""
    stay = set(kept_files(os.environ))
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            # The peers must see this rank's connections end.
            with contextlib.suppress(OSError):
                os.set_inheritable(int(name), int(name) in stay)
    os.environ[BEGAN_VARIABLE] = str(time.time())
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ)
