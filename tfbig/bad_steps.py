"""Steps whose loss or gradient is not finite, or whose loss leaps: found alike on every rank.

What is judged are values that a collective made equal everywhere, so that every rank comes to the
same verdict without another one.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tfbig.config import Config
from tfbig.errors import RunError

# Of a normal distribution, the standard deviation is this many median absolute deviations.
_DEVIATIONS = 1.4826
_FLOOR = 0.01  # of the median: the least that counts as a deviation, where losses hardly differ


class BadStep(NamedTuple):
    """A step whose update was not applied."""

    step: int
    reason: str


class BadSteps:
    """Judges the steps of a run and counts the bad ones.

    Args:
      config: the run.
      losses: (step, loss) of applied updates before this process, as `losses` gives them.
    """

    def __init__(self, config: Config, losses: Iterable[Iterable[float]] = ()) -> None:
        self._config = config.robustness
        self._max_loss = config.run.max_loss
        self._scales_loss = config.parallel.precision == "float16"
        self._losses: deque[tuple[int, float]] = deque(maxlen=self._config.spike_window + 1)
        self._losses.extend((int(step), float(loss)) for step, loss in losses)
        self._verdicts: deque[bool] = deque(maxlen=self._config.spike_window)
        self._rollbacks: dict[int, int] = {}

    def limit(self, step: int) -> float:
        """Returns the mean loss above which a step's update is skipped; 0 means none.

        The newest loss that it looks at is of two steps before: where steps overlap, that is the
        newest one that is known when a step is launched, and a resumed run must not know more.

        Args:
          step: the one to be launched, counted from 1.
        """
        limits = [self._max_loss] if self._max_loss else []
        losses = [loss for at, loss in self._losses if at <= step - 2]
        losses = losses[-self._config.spike_window :]
        if self._config.spike_threshold and len(losses) >= self._config.spike_window // 2:
            median = statistics.median(losses)
            deviation = _DEVIATIONS * statistics.median(abs(loss - median) for loss in losses)
            deviation = max(deviation, _FLOOR * abs(median))
            limits.append(median + self._config.spike_threshold * deviation)
        return min(limits, default=0.0)

    def judge(self, record: Mapping[str, Any], limit: float) -> BadStep | None:
        """Takes note of a step; returns what is wrong with it.

        Args:
          record: of the step, as for metrics.jsonl.
          limit: what `limit` said when it was launched.
        """
        step, loss, norm = record["step"], record["loss"], record["grad_norm"]
        reason = ""
        if record["num_tokens"] and not math.isfinite(loss):
            reason = f"the loss is {loss}"
        elif not math.isfinite(norm) and not self._scales_loss:  # whose scale is made to overflow
            reason = f"the gradient's norm is {norm} at a loss of {loss:.4f}"
        elif limit and loss > limit:
            reason = f"the loss {loss:.4f} is above {limit:.4f}"
        if record["applied"]:
            self._losses.append((step, loss))
        self._verdicts.append(bool(reason))
        return BadStep(step, reason) if reason else None

    def count(self, bad: BadStep) -> None:
        """Counts a bad step.

        Raises:
          RunError: there are too many, or the policy is to stop.
        """
        advice = (
            f"--replay_step={bad.step} repeats the step without changing the run's folder. What "
            "was saved before is intact"
        )
        if self._config.bad_step_policy == "stop":
            raise RunError(
                f"step {bad.step} is bad: {bad.reason}. events.jsonl names its samples; {advice}; "
                "--bad_step_policy=skip goes on without them.",
                on_all_ranks=True,
            )
        if sum(self._verdicts) > self._config.max_bad_steps:
            raise RunError(
                f"{sum(self._verdicts)} of the last {len(self._verdicts)} steps are bad, more than "
                f"--max_bad_steps={self._config.max_bad_steps}; the last one is step {bad.step}: "
                f"{bad.reason}. events.jsonl names their samples; {advice}.",
                on_all_ranks=True,
            )

    def roll_back(self, bad: BadStep, step: int) -> None:
        """Forgets what came after a checkpoint.

        Args:
          bad: why.
          step: of the checkpoint.

        Raises:
          RunError: it was rolled back to too often.
        """
        self._rollbacks[step] = self._rollbacks.get(step, 0) + 1
        if self._rollbacks[step] > self._config.max_rollbacks:
            raise RunError(
                f"step {bad.step} is bad ({bad.reason}), and the run was rolled back to step "
                f"{step} {self._config.max_rollbacks} times (--max_rollbacks) without getting "
                "to another checkpoint.",
                on_all_ranks=True,
            )
        kept = [(at, loss) for at, loss in self._losses if at <= step]
        self._losses.clear()
        self._losses.extend(kept)

    def losses(self) -> list[tuple[int, float]]:
        """Returns what a checkpoint keeps, so that a resumed run judges alike."""
        return list(self._losses) if self._config.spike_threshold else []
