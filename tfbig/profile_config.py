"""What a run measures of itself, and what follows from it. TensorFlow-free."""

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tfbig.number_rules import way_out

_STEPS = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """What a run measures of itself."""

    profile: bool = True
    """Whether hosts, steps and events are measured into RUN/profiler-output (docs/profiling.md)."""
    profile_interval_ms: int = 500
    """Milliseconds between two samples of each host's CPU, memory, disk, network and GPUs."""
    profile_steps: str = "5-7"
    """Steps that are captured by operation, e.g. 5,100-102; empty, or multi_worker, means none."""
    tensor_stats_every: int = 0
    """Steps between statistics of weights and gradients, for the tensor rules; 0 means none."""
    print_rules: bool = False
    """Whether each rule that fires during training is printed, and written to events.jsonl."""
    stop_on_rule: tuple[str, ...] = ()
    """Rule (docs/profiling.md) that stops the run, after a save, when it fires. Repeat for more."""
    rule_webhook: str = ""
    """URL that is told, as JSON, of each rule that fires during training; empty means none."""
    rule_seconds: float = 60.0
    """Seconds between two looks of the rules, for the three options above; 0 means none."""
    tracker: Literal["none", "mlflow", "wandb"] = "none"
    """Where the records go besides files and TensorBoard; wandb writes offline."""


def parse_steps(text: str) -> tuple[range, ...]:
    """Returns the ranges of steps that a text such as "5,100-102" names.

    Raises:
      ValueError: it names none.

    >>> parse_steps("5,100-102")
    (range(5, 6), range(100, 103))
    """
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _STEPS.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is neither a step nor a range such as 100-102")
        first, last = int(match[1]), int(match[2] or match[1])
        if first < 1 or last < first:
            raise ValueError(f"{part!r} counts from no step to a later one; the first step is 1")
        found.append(range(first, last + 1))
    return tuple(found)


def profile_problems(profile: ProfileConfig) -> Iterator[str]:
    """Yields one line for each rule that `profile` breaks."""
    if not 100 <= profile.profile_interval_ms <= 60_000:
        yield (
            f"--profile_interval_ms={profile.profile_interval_ms} must be between 100 and 60000: "
            "fewer milliseconds cost more than they tell, more miss what happens; "
            f"{way_out(profile, 'profile_interval_ms')}"
        )
    try:
        parse_steps(profile.profile_steps)
    except ValueError as error:
        yield f"--profile_steps={profile.profile_steps}: {error}; write e.g. 5,100-102."
    tracker = profile.tracker
    if tracker != "none" and importlib.util.find_spec(tracker) is None:
        yield f"--tracker={tracker} needs its package: pip install 'tfbig[{tracker}]'."
    if profile.tensor_stats_every < 0:
        yield (
            f"--tensor_stats_every={profile.tensor_stats_every} must be at least 0: give 0 "
            "for none."
        )
    if not 0 <= profile.rule_seconds < float("inf"):
        yield (
            f"--rule_seconds={profile.rule_seconds} must be at least 0 and finite: give 0 for none."
        )
    if profile.rule_webhook and not profile.rule_webhook.startswith(("http://", "https://")):
        yield (
            f"--rule_webhook={profile.rule_webhook} must begin with http:// or https://:"
            " give a whole URL."
        )
