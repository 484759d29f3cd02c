"""Learning rate and batch size as pure functions of where a run stands. TensorFlow-free."""

import math
from typing import NamedTuple

from tfbig.config import OptimizerConfig, RunConfig


def learning_rate(config: OptimizerConfig, step: int, num_replicas: int = 1) -> float:
    """Returns the learning rate of one step.

    It rises linearly over `warmup_steps` (the first step already moves: it gets 1/warmup_steps of
    the peak), then falls to `learning_rate_floor` of the peak at `decay_steps`, and stays there.

    Args:
      config: peak, schedule and floor.
      step: 0 for the first update. Skipped updates count.
      num_replicas: multiplies the rate where `scale_learning_rate` asks for it (arXiv 1706.02677).

    >>> config = OptimizerConfig(learning_rate=1.0, warmup_steps=2, decay_steps=10)
    >>> [learning_rate(config, step) for step in (0, 1, 10, 99)]
    [0.5, 1.0, 0.1, 0.1]
    """
    peak = config.learning_rate * (num_replicas if config.scale_learning_rate else 1)
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return peak
    span = max(1, config.decay_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    share = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    floor = config.learning_rate_floor
    return peak * (floor + (1 - floor) * share)


def slice_rows(global_batch: int, data_size: int, microbatches: int) -> int:
    """Returns the rows of one rank's slice: enough for all, and a multiple of the microbatches.

    Args:
      global_batch: sequences of an update over all ranks.
      data_size: slices that share them; where they don't divide, the last rows are filled up.
      microbatches: forwards a slice is cut into.

    >>> slice_rows(8, 2, 2), slice_rows(8, 3, 1), slice_rows(8, 3, 2)
    (4, 3, 4)
    """
    rows = -(-global_batch // data_size)
    return -(-rows // microbatches) * microbatches


class Segment(NamedTuple):
    """Consecutive steps with one batch size."""

    start_sample: int
    num_steps: int
    global_batch: int


def global_batch(run: RunConfig, consumed_samples: int) -> int:
    """Returns the sequences of the next update.

    With warm-up the batch grows in equal steps from `batch_warmup_start` to `global_batch`, as in
    GPT-3 (arXiv 2005.14165, section 2.3 and appendix B).

    Args:
      run: final size, start and length of the warm-up.
      consumed_samples: samples before this update.

    >>> run = RunConfig(global_batch=12, batch_warmup_start=4, batch_warmup_samples=30)
    >>> [global_batch(run, consumed) for consumed in (0, 9, 10, 20, 99)]
    [4, 4, 8, 12, 12]
    """
    start, samples = run.batch_warmup_start, run.batch_warmup_samples
    if not start or consumed_samples >= samples:
        return run.global_batch
    return start * (1 + consumed_samples * (run.global_batch // start) // samples)


def batch_sizes(run: RunConfig) -> set[int]:
    """Returns the smallest and the largest global batch; those between are multiples of the first.

    >>> run = RunConfig(global_batch=12, batch_warmup_start=4, batch_warmup_samples=30)
    >>> sorted(batch_sizes(run))
    [4, 12]
    """
    return {global_batch(run, 0), run.global_batch}


def batch_segments(run: RunConfig, step: int, consumed_samples: int) -> list[Segment]:
    """Returns the rest of a run as segments of equal batch size.

    Args:
      run: `steps` and the batch's warm-up.
      step: updates made.
      consumed_samples: samples before the next update.

    >>> run = RunConfig(steps=9, global_batch=4, batch_warmup_start=2, batch_warmup_samples=8)
    >>> [tuple(segment) for segment in batch_segments(run, 0, 0)]
    [(0, 2, 2), (4, 7, 4)]
    """
    segments: list[Segment] = []
    while step < run.steps:
        size = global_batch(run, consumed_samples)
        count = 1 if size < run.global_batch else run.steps - step
        if segments and segments[-1].global_batch == size:
            last = segments.pop()
            segments.append(last._replace(num_steps=last.num_steps + count))
        else:
            segments.append(Segment(consumed_samples, count, size))
        step += count
        consumed_samples += count * size
    return segments
