"""Where a run's time went, over all its restarts: the ledger sums to the time since it began."""

import itertools
from typing import Any, NamedTuple

import numpy as np

from tfbig.profiler.run_data import RunData

PARTS = (
    "training",
    "data wait",
    "lost steps",
    "initialisation",
    "compile",
    "evaluation",
    "checkpoint",
    "finalisation",
    "idle",
    "other",
)
_MEANING = {
    "training": "steps that hold, without what they waited for data",
    "data wait": "steps' wait for data, on rank 0",
    "lost steps": "steps that were made again after a restart from an older checkpoint",
    "initialisation": "from a process's start to its first step",
    "compile": "tracing and compiling in the first step of each process, and later ones",
    "evaluation": "evaluations",
    "checkpoint": "training stood still for a save; what is written beside it costs nothing here",
    "finalisation": "from the last step to the run's end, without evaluation and checkpoint",
    "idle": "between the last sign of one process and the start of the next",
    "other": "everything else, such as reading results and writing records",
}


class Session(NamedTuple):
    """One process's life."""

    begin: float  # seconds since 1970
    start: float  # of its first step
    end: float  # its last sign


class Ledger(NamedTuple):
    """Seconds by part of PARTS."""

    seconds: dict[str, float]
    total: float
    num_sessions: int
    num_lost_steps: int

    @property
    def goodput(self) -> float:
        """Share of the time in which steps that hold were computed."""
        return self.seconds["training"] / self.total if self.total > 0 else 0.0


def meaning(part: str) -> str:
    """Returns what a part of the ledger holds."""
    return _MEANING[part]


def sessions(run: RunData) -> list[Session]:
    """Returns the run's processes (rank 0's) in order."""
    signs = sorted(
        [(event["time"], event) for event in run.events]
        + [(time, None) for time in run.train.columns["time"].tolist()],
        key=lambda sign: sign[0],
    )
    found: list[Session] = []
    for time, event in signs:
        if event is not None and event["event"] == "start":
            begin = min(time, event.get("process_start", time))
            if found:  # a clock that was set back must not make time negative
                begin = max(begin, found[-1].end)
            found.append(Session(begin, time, time))
        elif found:
            found[-1] = found[-1]._replace(end=time)
    return found


def _compile_seconds(run: RunData) -> float:
    """Returns the seconds of compilation: first steps beyond the usual, and later tracing."""
    usual = float(np.median(run.step_seconds)) if len(run.step_seconds) else 0.0
    first = [e["seconds"] for e in run.events if e["event"] == "compile"]
    ranks = [one["rank"] for one in run.compilations]
    later = [one["seconds"] for one in run.compilations if one["rank"] == min(ranks)]
    return sum(max(0.0, seconds - usual) for seconds in first) + sum(later)


def _paused(event: dict[str, Any]) -> float:
    """Returns the seconds in which training stood still for an evaluation or a checkpoint."""
    if event["event"] == "checkpoint":
        # What a thread wrote beside training is in the steps' time already.
        return event.get("wait_seconds", event.get("seconds", 0.0))
    return event.get("seconds", 0.0) if event["event"] == "evaluation" else 0.0


def _finalisation(run: RunData, life: Session) -> float:
    """Returns a process's seconds from its last step to its end; 0 where it told of none."""
    stops = [e["time"] for e in run.events if e["event"] == "stop" and e["time"] == life.end]
    times = run.train.columns["time"]
    times = times[(times >= life.start) & (times <= life.end)]
    if not stops or not len(times):
        return 0.0
    last = float(times[-1])
    return max(
        0.0, life.end - last - sum(_paused(e) for e in run.events if last < e["time"] <= life.end)
    )


def ledger_of(run: RunData) -> Ledger:
    """Returns the ledger of a run."""
    lives = sessions(run)
    seconds = dict.fromkeys(PARTS, 0.0)
    if not lives:
        return Ledger(seconds, 0.0, 0, 0)
    total = lives[-1].end - lives[0].begin
    kept, spent = run.train.kept, run.train.columns["step_seconds"]
    waited = np.nan_to_num(run.train.columns["data_wait_seconds"])
    compiled = _compile_seconds(run)
    times = run.train.columns["time"]
    for life in lives:  # what a process's first step waited is part of its compilation
        waited[np.flatnonzero(times >= life.start)[:1]] = 0.0
    seconds["initialisation"] = sum(life.start - life.begin for life in lives)
    seconds["idle"] = sum(
        max(0.0, after.begin - before.end) for before, after in itertools.pairwise(lives)
    )
    for event in run.events:
        if event["event"] in ("evaluation", "checkpoint"):
            seconds[event["event"]] += _paused(event)
    seconds["finalisation"] = sum(_finalisation(run, life) for life in lives)
    seconds["lost steps"] = float(np.nansum(spent[~kept]))
    seconds["data wait"] = float(waited[kept].sum())
    seconds["compile"] = min(compiled, float(np.nansum(spent)))
    training = float(np.nansum(spent[kept])) - seconds["data wait"] - seconds["compile"]
    seconds["training"] = max(0.0, training)
    seconds["other"] = max(0.0, total - sum(seconds.values()))
    return Ledger(seconds, total, len(lives), int((~kept).sum()))


def ledger_rows(ledger: Ledger) -> list[dict[str, Any]]:
    """Returns the parts with their shares, largest first."""
    rows = [
        {"part": part, "seconds": value, "share": value / ledger.total if ledger.total else 0.0}
        for part, value in ledger.seconds.items()
    ]
    return sorted(rows, key=lambda row: -row["seconds"])
