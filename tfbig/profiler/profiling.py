"""Starts what measures a run, and ends it with the run."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from tfbig.config import Config
from tfbig.durable_file import write_atomic
from tfbig.loop import Hook
from tfbig.profile_config import parse_steps
from tfbig.profiler.clock_offset import estimate_offset
from tfbig.profiler.compilations import CompilationHook
from tfbig.profiler.event_writer import EventWriter
from tfbig.profiler.live import live_hooks
from tfbig.profiler.place import host_place
from tfbig.profiler.sampler import Sampler
from tfbig.profiler.step_table import StepTableWriter
from tfbig.profiler.tensor_stats import TensorStatsHook
from tfbig.profiler.timeline import TimelineHook
from tfbig.run_folder import RunFolder
from tfbig.stop_signal import StopSignal


@contextlib.contextmanager
def measured(
    config: Config,
    profiler_dir: Path,
    trainer: Any,
    sources: Sequence[str],
    stop_signal: StopSignal,
) -> Iterator[list[Hook]]:
    """Measures a run while the context lasts; entered by all ranks together.

    Args:
      config: of the run.
      profiler_dir: where the files go.
      trainer: built.
      sources: names of the data's sources.
      stop_signal: set when a rule is to stop the run.

    Yields:
      This rank's hooks; none under --noprofile.
    """
    if not config.profile.profile:
        yield []
        return
    offset = estimate_offset(trainer)
    place = host_place()
    interval = config.profile.profile_interval_ms / 1000
    closing = contextlib.ExitStack()
    with closing:
        try:
            hooks = _hooks(config, profiler_dir, trainer, offset, place, closing)
            if trainer.rank == 0:
                write_atomic(profiler_dir / "sources.json", orjson.dumps(list(sources)))
                for hook in live_hooks(config.profile, profiler_dir.parent, stop_signal.request):
                    closing.callback(hook.close)
                    hooks.append(hook)
                if config.run.tensorboard:
                    from tfbig.profiler.tensorboard_text import TensorBoardTextHook

                    run = RunFolder(profiler_dir.parent)
                    hooks.append(TensorBoardTextHook(run.path, run.tensorboard_dir, config))
            if place.local_rank == 0:
                sampler = Sampler(profiler_dir, place, interval, offset.seconds)
                sampler.start()
                closing.callback(sampler.stop)
        except OSError as error:
            print(f"warning: the run is not measured: {error}", file=sys.stderr, flush=True)
            hooks = []
        yield hooks


def _hooks(
    config: Config,
    profiler_dir: Path,
    trainer: Any,
    offset: Any,
    place: Any,
    closing: contextlib.ExitStack,
) -> list[Hook]:
    description = {
        "size": trainer.size,
        "node_id": place.node_id,
        "hostname": place.hostname,
        "local_rank": place.local_rank,
        "clock_offset_seconds": offset.seconds,
        "clock_error_seconds": offset.error,
    }
    interval = config.profile.profile_interval_ms / 1000
    timeline = TimelineHook(
        StepTableWriter(profiler_dir, trainer.rank, description),
        EventWriter(profiler_dir, trainer.rank, place.hostname, offset.seconds),
        offset.seconds,
        interval,
    )
    closing.callback(timeline.close)
    hooks: list[Hook] = [timeline, CompilationHook(profiler_dir, trainer.rank)]
    if every := config.profile.tensor_stats_every:
        # Histograms of the whole model: where ranks hold shares, each has its own.
        board = Path(config.run.run_dir) / "tensorboard" if config.run.tensorboard else None
        hooks.append(TensorStatsHook(profiler_dir, trainer, every, board))
    steps = parse_steps(config.profile.profile_steps)
    if steps and trainer.can_be_captured:
        from tfbig.profiler.capture import CaptureHook

        capture = CaptureHook(profiler_dir, trainer.rank, steps)
        closing.callback(capture.close)
        hooks.append(capture)
    return hooks
