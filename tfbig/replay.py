"""One step of a run made once more, from the checkpoint before it; nothing is written."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from tfbig.bad_samples import examine_step
from tfbig.bad_steps import BadSteps
from tfbig.config import Config
from tfbig.loop import Loop, Progress
from tfbig.metrics import Throughput
from tfbig.run_folder import RunFolder, read_events
from tfbig.saving import Saved
from tfbig.schedule import global_batch, learning_rate
from tfbig.stop_signal import StopSignal

_CHARACTERS = 80  # shown of a sample's text


class _NoSaver:
    def save(self, progress: Progress, metadata: dict[str, Any]) -> None:
        return None

    def finished(self, wait: bool = False) -> list[Saved]:
        return []


def replay_step(
    config: Config,
    trainer: Any,
    data: Any,
    progress: Progress,
    losses: list,
    open_batches: Callable[[Progress], Iterator[Any]],
) -> None:
    """Trains up to a step, then shows its samples, the worst first, and its result.

    Args:
      config: the run's, with --replay_step.
      trainer: in the state of `progress`.
      data: of the run.
      progress: of a checkpoint before the step.
      losses: that the checkpoint knows, for BadSteps.
      open_batches: gives the batches from a point on.
    """
    step = config.robustness.replay_step
    progress = _as_it_was_made(config, trainer, progress)
    if trainer.rank == 0:
        print(
            f"replaying step {step} from step {progress.step} and sample "
            f"{progress.consumed_samples:,}",
            flush=True,
        )
    run = dataclasses.replace(config.run, steps=step - 1, eval_every=0, checkpoint_every=0)
    robustness = dataclasses.replace(config.robustness, bad_step_policy="skip")
    shorter = dataclasses.replace(config, run=run, robustness=robustness)
    with StopSignal() as stop_signal:
        loop = Loop(
            config=shorter,
            trainer=trainer,
            open_batches=open_batches,
            evaluate=lambda: {"loss": math.nan},
            saver=_NoSaver(),
            hooks=[],
            throughput=Throughput.of(config, 0.0),
            stop_signal=stop_signal,
            bad_steps=BadSteps(shorter, losses),
        )
        if loop.run(progress, resumed=True) == "signal":
            return
    _show(config, trainer, data, loop.progress, loop.bad_steps, open_batches)


def _as_it_was_made(config: Config, trainer: Any, progress: Progress) -> Progress:
    """Returns where the stream stood at the checkpoint when the step was made, as rank 0 reads."""
    first = progress.consumed_samples
    if trainer.rank == 0 and RunFolder(config.run.run_dir).events_path.exists():
        events = read_events(config.run.run_dir)
        first = first_sample(events, config.robustness.replay_step, progress)
    return progress._replace(
        consumed_samples=int(trainer.broadcast(np.array([first], np.int64))[0])
    )


def first_sample(events: Iterable[Mapping[str, Any]], step: int, checkpoint: Progress) -> int:
    """Returns the sample at which a run went on from a checkpoint, on its way to a step.

    A rollback leaves samples out; a process that starts again does not. Of the ways on which the
    step was made, one on which it was bad is meant, else the last.

    Args:
      events: of the run, in order.
      step: counted from 1.
      checkpoint: from before it.

    >>> rollback = {"event": "rollback", "to_step": 2, "first_sample": 8, "last_sample": 19}
    >>> first_sample([rollback], 4, Progress(2, 8))
    20
    """
    first = bad = checkpoint.consumed_samples
    is_bad = False
    for event in events:
        if event["event"] == "start" and event["step"] <= checkpoint.step:
            first = checkpoint.consumed_samples
            is_bad = is_bad and event["step"] == checkpoint.step
        elif event["event"] == "bad_step" and event["step"] == step:
            bad, is_bad = first, True
        elif event["event"] == "rollback" and event["to_step"] <= checkpoint.step:
            # To an older one: what was saved there since is a checkpoint of its own.
            same = (event["to_step"], event["first_sample"]) == checkpoint
            first = event["last_sample"] + 1 if same else checkpoint.consumed_samples
            is_bad = is_bad and same
    return bad if is_bad else first


def _show(
    config: Config,
    trainer: Any,
    data: Any,
    before: Progress,
    bad_steps: BadSteps,
    open_batches: Callable[[Progress], Iterator[Any]],
) -> None:
    batch = next(open_batches(before))
    found = examine_step(config, trainer, data, before.consumed_samples, batch)
    limit = bad_steps.limit(before.step + 1)
    rate = learning_rate(config.optimizer, before.step, trainer.num_replicas)
    result = trainer.train_step(batch, before.step, rate, limit, 0)
    loss = float(result.loss_sum) / max(float(result.num_tokens), 1.0)
    if trainer.rank:
        return
    count = global_batch(config.run, before.consumed_samples)
    print(
        f"step {before.step + 1}: loss {loss:.6f}, gradient norm {float(result.grad_norm):.6f}, "
        f"update {'applied' if bool(result.applied) else 'SKIPPED'}"
        f"{f', limit {limit:.4f}' if limit else ''}\n"
        f"samples {found['first_sample']:,} to {found['last_sample']:,} ({count}), "
        + ", ".join(f"{number} of {source}" for source, number in found["sources"].items())
    )
    for worst in found["worst"]:
        text = _text(data, worst["sample"], config.run.seed)
        print(f"  sample {worst['sample']:,}  loss {worst['loss']}  {worst['source']}  {text!r}")


def _text(data: Any, position: int, seed: int) -> str:
    row = data.rows("train", np.array([position], np.int64), seed)["tokens"][0]
    return data.tokenizer.decode(row)[:_CHARACTERS]
