"""What a run does about saving, hanging and bad steps. TensorFlow-free."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tfbig.number_rules import way_out


@dataclass(frozen=True, kw_only=True)
class RobustnessConfig:
    """How a run is kept safe; none of it changes what an undisturbed run computes."""

    keep_every: int = 0
    """Checkpoints whose step is a multiple of this are kept for ever; 0 means none."""
    async_checkpoints: bool = True
    """Whether training goes on while a checkpoint is written from a copy in host memory."""
    hang_timeout: float = 1800.0
    """Seconds without progress after which the job says where it stands and ends; 0 means never."""
    bad_step_policy: Literal["skip", "rollback", "stop"] = "skip"
    """After a step of NaN, Inf or a leap of the loss: drop it, go back to a checkpoint, or end."""
    max_bad_steps: int = 10
    """Bad steps among the last spike_window after which the run ends."""
    max_rollbacks: int = 3
    """Rollbacks to one checkpoint after which the run ends."""
    spike_threshold: float = 0.0
    """Robust deviations above the median at which a loss counts as bad, e.g. 10; 0 means none."""
    spike_window: int = 100
    """Newest losses of which median and deviation (MAD) are taken; judging begins at half."""
    check_replicas_every: int = 100
    """Steps between comparisons of the weights that ranks hold copies of; 0 means none."""
    elastic: bool = False
    """Whether a run goes on as ranks come and go (horovodrun --min-np --host-discovery-script)."""
    replay_step: int = 0
    """Only repeats this step of a run from the checkpoint before it, and shows its samples."""


def robustness_problems(config: RobustnessConfig) -> Iterator[str]:
    """Yields one line for each rule that the section breaks."""
    at_least_0 = (
        "keep_every hang_timeout check_replicas_every max_bad_steps max_rollbacks spike_threshold"
        " replay_step"
    ).split()
    for name, minimum in [*((name, 0) for name in at_least_0), ("spike_window", 2)]:
        value = getattr(config, name)
        if not minimum <= value < math.inf:
            yield f"--{name}={value} must be at least {minimum} and finite: {way_out(config, name)}"
