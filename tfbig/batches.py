"""The batches of a run: what each process feeds of the stream and of the validation split."""

import itertools
from collections.abc import Iterator
from typing import Any

from tfbig import schedule
from tfbig.config import Config, replace_fields
from tfbig.stop_signal import STOP


def filled_up(config: Config, trainer: Any) -> Config:
    """Returns the run with the rows that fill up an elastic run's slices counted in."""
    if not config.robustness.elastic:
        return config
    rows = slice_of(config, trainer)
    return replace_fields(config, {"global_batch": rows * trainer.data_size})


def slice_of(config: Config, trainer: Any) -> int:
    """Returns the rows of a rank's slice of the global batch."""
    return schedule.slice_rows(
        config.run.global_batch, trainer.data_size, config.parallel.microbatches
    )


def train_batches(config: Config, trainer: Any, data: Any, progress: Any) -> Iterator[Any]:
    """Returns this process's batches from the next sample on, through batch warm-up."""
    return itertools.chain.from_iterable(
        data.train_batches(
            start_sample=segment.start_sample,
            num_steps=segment.num_steps,
            global_batch=segment.global_batch,
            data_rank=trainer.data_rank,
            data_size=trainer.data_size,
            seed=config.run.seed,
            slice_rows=schedule.slice_rows(
                segment.global_batch, trainer.data_size, config.parallel.microbatches
            )
            if config.robustness.elastic
            else 0,
        )
        for segment in schedule.batch_segments(config.run, *progress)
    )


def evaluate_validation(
    config: Config, trainer: Any, data: Any, stop_signal: Any, pulse: Any
) -> dict[str, float] | None:
    """Returns the measures of the whole validation split, and those of averaged weights.

    None means that a rank was told to stop meanwhile.
    """
    from tfbig.evaluation import EvaluationStopped, evaluate

    def stop_together() -> None:
        pulse.enter("evaluation")
        if trainer.agree(stop_signal.value, "max") >= STOP:
            raise EvaluationStopped

    split = data.evaluation_batches(
        "validation",
        global_batch=slice_of(config, trainer) // config.parallel.microbatches * trainer.data_size,
        data_rank=trainer.data_rank,
        data_size=trainer.data_size,
    )
    num_bytes = data.num_bytes("validation")
    try:
        measures = evaluate(trainer, split, num_bytes, before_batch=stop_together)
        if config.optimizer.ema_decay:
            averaged = evaluate(trainer, split, 0, "ema", stop_together)
            measures["ema_loss"] = averaged["loss"]
    except EvaluationStopped:
        return None
    return measures
