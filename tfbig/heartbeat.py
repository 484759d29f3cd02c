"""Where each rank of a run is: told by its training thread, kept in a small file of each rank."""

import contextlib
import os
import socket
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from tfbig.metrics import StepTimes

_SMOOTHING = 0.1  # share of the newest step in a rank's mean times


class Place(NamedTuple):
    """Where a training thread is."""

    step: int  # optimizer updates launched
    phase: str  # start, data, compile, step, evaluation, rollback, save
    since: float  # time.monotonic() of its beginning


class Pulse:
    """What a training thread tells the watchdog; telling costs an assignment.

    Attributes:
      place: where the thread is.
      times: means over recent steps: data, compute, communication, in seconds.
      slowest: for the metrics: which rank the others wait for, and why; of rank 0 only.
    """

    def __init__(self) -> None:
        self.place = Place(0, "start", time.monotonic())
        self.times: dict[str, float] = {}
        self.slowest: dict[str, Any] = {}
        self._has_traced = False

    def enter(self, phase: str, step: int | None = None) -> None:
        """Notes progress.

        Args:
          phase: what begins.
          step: updates launched; None means as many as before.
        """
        self.place = Place(self.place.step if step is None else step, phase, time.monotonic())

    def note_times(self, times: StepTimes) -> None:
        """Adds a step's times to the means; the first step's are of its tracing, and left out."""
        if not self._has_traced:
            self._has_traced = True
            return
        communication = sum(times.communication.values())
        compute = max(0.0, times.step - times.data_wait - communication)
        new = {"data": times.data_wait, "compute": compute, "communication": communication}
        old = self.times or new
        self.times = {name: old[name] + _SMOOTHING * (new[name] - old[name]) for name in new}


class Heartbeats:
    """The files of all ranks of a run.

    Args:
      directory: `heartbeats` of the run's folder; made when missing.
      rank: this process.
      size: number of ranks.
    """

    def __init__(self, directory: str | os.PathLike[str], rank: int, size: int) -> None:
        self._directory, self._rank, self._size = Path(directory), rank, size

    def write(self, pulse: Pulse) -> None:
        """Replaces this rank's file; a disk that is full or failing is no reason to stop."""
        place = pulse.place
        record = {
            "step": place.step,
            "phase": place.phase,
            "seconds_in_phase": time.monotonic() - place.since,
            "time": time.time(),  # for people: hosts' clocks differ, and jump
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "times": pulse.times,
        }
        path = self._path(self._rank)
        temporary = path.with_suffix(".tmp")
        with contextlib.suppress(OSError):
            self._directory.mkdir(exist_ok=True)
            temporary.write_bytes(orjson.dumps(record) + b"\n")
            os.replace(temporary, path)  # whole for every reader; nobody needs it after a crash

    def sweep(self) -> None:
        """Removes the files of ranks that this run had before, with more of them."""
        with contextlib.suppress(OSError):
            for path in self._directory.glob("rank-*"):
                number = path.stem.partition("-")[2]
                if number.isdigit() and int(number) >= self._size:
                    path.unlink()

    def read(self) -> dict[int, dict[str, Any]]:
        """Returns what the ranks' files say, by rank; a rank without one is left out."""
        found = {}
        for rank in range(self._size):
            with contextlib.suppress(OSError, ValueError):
                found[rank] = orjson.loads(self._path(rank).read_bytes())
        return found

    def remove(self) -> None:
        """Removes this rank's file, and the folder with the last one."""
        with contextlib.suppress(OSError):
            self._path(self._rank).unlink()
            self._directory.rmdir()

    def _path(self, rank: int) -> Path:
        return self._directory / f"rank-{rank:05d}.json"


class Silence:
    """How long each rank's heartbeat has been the same, by the clock of the one who looks."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Mapping[str, Any], float]] = {}

    def note(self, records: Mapping[int, Mapping[str, Any]], now: float) -> None:
        """Looks at the heartbeats.

        Args:
          records: by rank.
          now: seconds, of a clock that does not jump.
        """
        for rank, record in records.items():
            if rank not in self._seen or self._seen[rank][0] != record:
                self._seen[rank] = record, now

    def seconds(self, now: float) -> dict[int, float]:
        """Returns for how long what was last seen of each rank has stood, as far as was looked."""
        return {rank: now - since for rank, (_, since) in self._seen.items()}


def slowest_rank(times: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    """Returns which rank the others wait for, and what it spends more time on than they do.

    In a step that ends together, the slowest rank is the one that waits least for the others:
    that of most data and compute time.

    Args:
      times: by rank, seconds of data, compute and communication.

    >>> quick = {"data": 0.0, "compute": 1.0, "communication": 1.0}
    >>> slow = {"data": 0.9, "compute": 1.1, "communication": 0.0}
    >>> slowest_rank({0: quick, 1: slow, 2: quick})
    {'slowest_rank': 1, 'slowest_cause': 'data', 'slowest_seconds': 1.0}
    """
    times = {rank: known for rank, known in times.items() if known}
    if len(times) < 2:
        return {}
    own = {rank: known["data"] + known["compute"] for rank, known in times.items()}
    rank = max(own, key=lambda number: own[number])
    excess = own[rank] - statistics.median_low(own.values())
    parts = {
        name: times[rank][name] - statistics.median_low(known[name] for known in times.values())
        for name in ("data", "compute")
    }
    cause = max(parts, key=lambda name: parts[name])
    if excess < 0.1 * own[rank] and times[rank]["communication"] > own[rank]:
        cause = "communication"  # no rank stands out: the wire is what all wait for
    return {"slowest_rank": rank, "slowest_cause": cause, "slowest_seconds": round(excess, 6)}
