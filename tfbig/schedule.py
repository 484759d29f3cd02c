"""The learning rate as a pure function of the step. TensorFlow-free."""

import math

from tfbig.config import OptimizerConfig


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
