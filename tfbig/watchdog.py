"""A thread in each rank that ends the job when nothing moves, and says where everything stands."""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfbig.command import EXIT_FAULT
from tfbig.heartbeat import Heartbeats, Place, Pulse, Silence, slowest_rank
from tfbig.run_folder import EventWriter, RunFolder

_INTERVAL = 2.0  # seconds between two looks, and between two heartbeats
_SILENT_AFTER = 5 * _INTERVAL  # seconds without a heartbeat after which a rank's process stands
_PARTED_AFTER = 30.0  # seconds that ranks wait in places where they can't meet
_MINUTE = 60.0
_START_SECONDS = 1800.0  # tracing a large model takes long, whatever a step takes


class Watchdog:
    """Watches this rank's training thread while it is entered.

    When the thread tells `pulse` nothing for `timeout` seconds, the stacks of all threads, the
    phase, the ranks that are behind and what is known of the collective go to standard error and
    to hang-rank-N.txt in the run's folder, and the process ends with code 1, so that the launcher
    ends the job. Rank 0's ends it earlier where ranks stand in places where they can't meet. Time
    in which the process itself was stopped is not counted. If no Python thread can run any more,
    faulthandler's own thread ends the process, a minute later.

    Args:
      folder: the run's.
      rank: this process.
      size: number of ranks.
      timeout: seconds; 0 only keeps the heartbeat. Before the first step's end it is at least
        _START_SECONDS.
      stalled: of the trainer: tells which collective waits for which ranks.

    Attributes:
      pulse: for the training thread.
      hosts: of the ranks whose heartbeat was seen so far: a rank that ends takes its file with it.
    """

    def __init__(
        self,
        folder: RunFolder,
        rank: int,
        size: int,
        timeout: float,
        stalled: Callable[[], list[str]] = list,
    ) -> None:
        self._folder, self._rank, self._size, self._timeout = folder, rank, size, timeout
        self._stalled = stalled
        self._heartbeats = Heartbeats(folder.heartbeats_dir, rank, size)
        self._silence = Silence()
        self._interval = min(_INTERVAL, timeout / 4) if timeout else _INTERVAL
        self._silent_after = min(_SILENT_AFTER, timeout / 2) if timeout else _SILENT_AFTER
        self._awake = 0.0  # seconds of watching, without those in which the process was stopped
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.pulse = Pulse()
        self.hosts: dict[int, str] = {}

    def __enter__(self) -> "Watchdog":
        if self._rank == 0:
            self._heartbeats.sweep()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(_SILENT_AFTER)  # it may be stuck where the disk is
        if self._timeout:
            faulthandler.cancel_dump_traceback_later()
        self._heartbeats.remove()

    def _watch(self) -> None:
        place, idle, last = self.pulse.place, 0.0, time.monotonic()
        while True:
            if self._timeout:
                faulthandler.dump_traceback_later(self._timeout + _MINUTE, exit=True, file=2)
            self._heartbeats.write(self.pulse)
            limit = self._limit(place)
            if self._is_to_look(limit - idle):
                self._look()
            if self._ended.wait(self._interval):
                return
            now = time.monotonic()
            # One look counts for two intervals at most: more is a process that was stopped.
            passed = min(now - last, 2 * self._interval)
            idle, self._awake, last = idle + passed, self._awake + passed, now
            if self.pulse.place is not place:
                place, idle = self.pulse.place, 0.0
            if self._timeout and idle > self._limit(place):
                self._end_the_job(
                    f"tfbig: rank {self._rank} of {self._size} made no progress for {idle:.0f} s "
                    f"(--hang_timeout={self._timeout:g}): step {place.step}, phase {place.phase}."
                )

    def _limit(self, place: Place) -> float:
        starting = place.phase in ("start", "compile")
        return max(self._timeout, _START_SECONDS) if starting else self._timeout

    def _is_to_look(self, left: float) -> bool:
        """Returns whether to read the others' heartbeats, of which there may be thousands.

        Args:
          left: seconds until this rank ends the job. Who is silent takes two looks to know.
        """
        if self._size == 1:
            return False
        nears = 0 < 2 * self._silent_after - left <= 2 * self._interval
        return self._rank == 0 or len(self.hosts) < self._size or (self._timeout > 0 and nears)

    def _look(self) -> None:
        known = self._heartbeats.read()
        self._silence.note(known, self._awake)
        self.hosts |= {rank: record["host"] for rank, record in known.items()}
        if self._rank:
            return
        self.pulse.slowest = slowest_rank({rank: known[rank]["times"] for rank in known})
        if self._timeout and (words := parted_ranks(known)):
            self._end_the_job(words)

    def _end_the_job(self, words: str) -> None:
        """Writes all that is known, and ends the process.

        Args:
          words: what is wrong.
        """
        place, records = self.pulse.place, self._heartbeats.read()
        self._silence.note(records, self._awake)
        silence = self._silence.seconds(self._awake)
        lines = [words, *ranks_behind(records, self._size, silence, self._silent_after)]
        self._write_report(lines)
        heard = self._hear()
        lines += heard
        with contextlib.suppress(OSError):
            text = "".join(f"{line}\n" for line in heard)
            sys.stderr.write(text)
            sys.stderr.flush()
            with open(self._folder.hang_path(self._rank), "a", encoding="utf-8") as file:
                file.write(text)
        # One of those that stand in the same place writes; rank 0 may be the one that is stopped.
        alike = [
            rank
            for rank, record in records.items()
            if (record["step"], record["phase"]) == (place.step, place.phase)
            and silence.get(rank, 0.0) <= self._silent_after
        ]
        if self._rank == min(alike, default=self._rank):
            with contextlib.suppress(OSError):
                events = EventWriter(self._folder.events_path)
                events.write_event("hang", " ".join(lines), step=place.step, rank=self._rank)
        # The first process to end has the launcher end the others, which are about to say the same.
        time.sleep(2 * self._interval)
        os._exit(EXIT_FAULT)

    def _hear(self) -> list[str]:
        """Returns what the trainer knows of the collective; the heart beats on meanwhile."""
        heard: list[str] = []
        if self._timeout:
            faulthandler.dump_traceback_later(self._timeout + 2 * _MINUTE, exit=True, file=2)
        thread = threading.Thread(target=lambda: heard.extend(self._stalled()), daemon=True)
        thread.start()
        while thread.is_alive():
            self._heartbeats.write(self.pulse)
            thread.join(self._interval)
        return heard

    def _write_report(self, lines: Sequence[str]) -> None:
        """Writes lines and all threads' stacks to standard error and to the run's folder."""
        text = "".join(f"{line}\n" for line in lines)
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()
            faulthandler.dump_traceback(2, all_threads=True)
        with (
            contextlib.suppress(OSError),
            open(self._folder.hang_path(self._rank), "w", encoding="utf-8") as file,
        ):
            file.write(text)
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)


def parted_ranks(records: Mapping[int, Mapping[str, Any]]) -> str:
    """Returns which ranks wait for each other where they can't meet, "" where none do.

    An evaluation needs all ranks, and so does a later step: no rank can be in one while another
    is in the other, as happens when ranks count steps differently.

    Args:
      records: the ranks' heartbeats.
    """
    waiting = {r: o for r, o in records.items() if o["seconds_in_phase"] > _PARTED_AFTER}
    evaluating = {r: o["step"] for r, o in waiting.items() if o["phase"] == "evaluation"}
    training = {r: o["step"] for r, o in waiting.items() if o["phase"] == "step"}
    for rank, step in sorted(evaluating.items()):
        ahead = [other for other, later in training.items() if later > step]
        if ahead:
            return (
                f"tfbig: rank {rank} is in the evaluation after step {step}, rank {min(ahead)} in "
                f"step {training[min(ahead)]}: they have lost each other, and would wait for ever."
            )
    return ""


def ranks_behind(
    records: Mapping[int, Mapping[str, Any]],
    size: int,
    silence: Mapping[int, float],
    silent_after: float = _SILENT_AFTER,
) -> list[str]:
    """Returns a line for each rank that the others wait for.

    Args:
      records: the ranks' heartbeats.
      size: number of ranks.
      silence: by rank, seconds for which its heartbeat has stood.
      silent_after: seconds after which a process is taken to be stopped.

    >>> records = {0: {"step": 5, "phase": "step"}}
    >>> ranks_behind(records, 2, {0: 1.0})
    ['rank 1: no heartbeat was ever seen.']
    """
    missing = sorted(set(range(size)) - set(records))
    lines = [f"rank {rank}: no heartbeat was ever seen." for rank in missing]
    newest = max((record["step"] for record in records.values()), default=0)
    phases = {record["phase"] for record in records.values() if record["step"] == newest}
    for rank, record in sorted(records.items()):
        where = f"step {record['step']}, phase {record['phase']}"
        who = f"rank {rank} (host {record.get('host')}, pid {record.get('pid')})"
        silent = silence.get(rank, 0.0)
        if silent > silent_after:
            lines.append(
                f"{who}: its last heartbeat is {silent:.0f} s old or more, from {where}: the "
                "process is stopped, or its host is gone."
            )
        elif record["step"] < newest:
            lines.append(f"{who} is behind: {where}, where others are at step {newest}.")
        elif record["phase"] != "step" and "step" in phases:
            lines.append(f"{who} is behind: {where}, where others wait in that step.")
    if not lines and size > 1:
        lines.append(f"No rank is behind: all {size} stand in the same step and phase.")
    return lines
