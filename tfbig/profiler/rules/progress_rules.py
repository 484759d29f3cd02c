"""Rules of a run's progress: whether it begins, and whether it goes on.

While a run trains they count up to now: a run that hangs writes nothing more.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tfbig.profiler.rules.rule import Finding, Rule
from tfbig.profiler.run_data import RunData


def _signs_by_start(run: RunData) -> Iterator[tuple[float, np.ndarray, bool]]:
    """Yields (beginning, times of all signs of life, whether a step was made) of each process."""
    starts = [event for event in run.events if event["event"] == "start"]
    if not starts:
        return
    times = np.sort(
        np.concatenate([run.train.columns["time"], [event["time"] for event in run.events]])
    )
    first_steps = [e["time"] for e in run.events if e["event"] == "first_step"]
    first_steps += run.train.columns["time"].tolist()
    ends = [event["time"] for event in starts[1:]] + [float("inf")]
    for start, end in zip(starts, ends, strict=True):
        signs = times[(times >= start["time"]) & (times < end)]
        has_stepped = any(start["time"] <= time < end for time in first_steps)
        if end == float("inf") and run.now is not None and not _has_ended(run):
            signs = np.append(signs, max(run.now, signs[-1]))
        yield start.get("process_start", start["time"]), signs, has_stepped


def _has_ended(run: RunData) -> bool:
    return bool(run.events) and run.events[-1]["event"] == "stop"


@dataclass(frozen=True)
class MaxInitializationTime(Rule):
    """The first step is long in coming."""

    threshold: float = 20  # minutes

    def look(self, run: RunData) -> Finding:
        worst, count, bad, waits = 0.0, 0, 0, False
        firsts = [event["time"] for event in run.events if event["event"] == "first_step"]
        for begun, signs, has_stepped in _signs_by_start(run):
            count += 1
            reached = [time for time in firsts if signs[0] <= time <= signs[-1]]
            # Without a first step the time to the last sign of life counts, or to now.
            seconds = (reached[0] if reached else signs[-1]) - begun
            bad += seconds > 60 * self.threshold
            if seconds > worst:
                worst, waits = float(seconds), not has_stepped
        if waits:
            evidence = f"for {worst:.1f} s from the start no step came"
        else:
            evidence = f"the longest of {count} starts took {worst:.1f} s to the first step"
        change = (
            "prepare the data before (python -m tfbig.prepare) and name them by --data; the"
            " report's ledger has the parts"
        )
        benefit = f"no time of steps; up to {worst / 60:.0f} minutes at each start"
        return self.found(bad > 0, count, bad, evidence, change, benefit=benefit)


@dataclass(frozen=True)
class StalledTraining(Rule):
    """Nothing was heard of the run for long, and it has not ended."""

    kind: ClassVar[str] = "tensor"
    threshold: float = 1800  # seconds

    def look(self, run: RunData) -> Finding:
        # Between one process's end and the next one's start nothing is expected.
        gaps = [np.diff(signs) for _, signs, _ in _signs_by_start(run)]
        if not gaps:
            return self.nothing("nothing is recorded")
        silences = np.concatenate(gaps)
        longest = float(silences.max()) if len(silences) else 0.0
        bad = int((silences > self.threshold).sum())
        evidence = f"the longest silence was {longest:.1f} s"
        if run.now is not None and len(gaps[-1]) and not _has_ended(run):
            evidence += f"; the last sign of life was {gaps[-1][-1]:.1f} s ago"
        return self.found(
            bad > 0,
            len(silences) + 1,
            bad,
            evidence,
            f"--hang_timeout={self.threshold / 2:g} ends such a run and says which rank was silent,"
            " and where",
            benefit=f"no time of steps; up to {longest / 60:.0f} minutes of silence",
        )
