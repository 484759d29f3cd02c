"""A thread in each rank that ends the job when nothing moves, and says where everything stands."""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from tfbig.command import EXIT_FAULT
from tfbig.heartbeat import Heartbeats, Pulse, slowest_rank
from tfbig.run_folder import EventWriter, RunFolder

_INTERVAL = 2.0  # seconds between two looks, and between two heartbeats
_SILENT_AFTER = 5 * _INTERVAL  # seconds without a heartbeat after which a rank's process stands
_MINUTE = 60.0
_START_SECONDS = 1800.0  # tracing a large model takes long, whatever a step takes


class Watchdog:
    """Watches this rank's training thread while it is entered.

    When the thread tells `pulse` nothing for `timeout` seconds, the stacks of all threads, the
    phase and the ranks that are behind go to standard error and to hang-rank-N.txt in the run's
    folder, and the process ends with code 1, so that the launcher ends the job. Time in which the
    process itself was stopped is not counted. If no Python thread can run any more, faulthandler's
    own thread ends the process, a minute later.

    Args:
      folder: the run's.
      rank: this process.
      size: number of ranks.
      timeout: seconds; 0 only keeps the heartbeat. Before the first step's end it is at least
        _START_SECONDS.

    Attributes:
      pulse: for the training thread.
      hosts: of the ranks whose heartbeat was seen so far: a rank that ends takes its file with it.
    """

    def __init__(self, folder: RunFolder, rank: int, size: int, timeout: float) -> None:
        self._folder, self._rank, self._size, self._timeout = folder, rank, size, timeout
        self._heartbeats = Heartbeats(folder.heartbeats_dir, rank, size)
        self._interval = min(_INTERVAL, timeout / 4) if timeout else _INTERVAL
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
            if self._size > 1 and (self._rank == 0 or len(self.hosts) < self._size):
                known = self._heartbeats.read()
                self.hosts |= {rank: record["host"] for rank, record in known.items()}
                if self._rank == 0:
                    times = {rank: record["times"] for rank, record in known.items()}
                    self.pulse.slowest = slowest_rank(times)
            if self._ended.wait(self._interval):
                return
            now = time.monotonic()
            # One look counts for two intervals at most: more is a process that was stopped.
            idle += min(now - last, 2 * self._interval)
            last = now
            if self.pulse.place is not place:
                place, idle = self.pulse.place, 0.0
            starting = place.phase in ("start", "compile")
            limit = max(self._timeout, _START_SECONDS) if starting else self._timeout
            if self._timeout and idle > limit:
                self._end_the_job(idle)

    def _end_the_job(self, idle: float) -> None:
        place = self.pulse.place
        lines = [
            f"tfbig: rank {self._rank} of {self._size} made no progress for {idle:.0f} s "
            f"(--hang_timeout={self._timeout:g}): step {place.step}, phase {place.phase}.",
            *ranks_behind(self._heartbeats.read(), self._size, time.time()),
            "",
        ]
        text = "\n".join(lines)
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
        if self._rank == 0:
            with contextlib.suppress(OSError):
                events = EventWriter(self._folder.events_path)
                events.write_event("hang", " ".join(lines).strip(), step=place.step)
        # The first process to end has the launcher end the others, which are about to say the same.
        time.sleep(2 * self._interval)
        os._exit(EXIT_FAULT)


def ranks_behind(records: Mapping[int, Mapping[str, Any]], size: int, now: float) -> list[str]:
    """Returns a line for each rank that the others wait for.

    Args:
      records: the ranks' heartbeats.
      size: number of ranks.
      now: seconds since 1970.

    >>> records = {0: {"step": 5, "phase": "step", "time": 9.0}}
    >>> ranks_behind(records, 2, 10.0)
    ['rank 1: no heartbeat was ever seen.']
    """
    missing = sorted(set(range(size)) - set(records))
    lines = [f"rank {rank}: no heartbeat was ever seen." for rank in missing]
    newest = max((record["step"] for record in records.values()), default=0)
    phases = {record["phase"] for record in records.values() if record["step"] == newest}
    for rank, record in sorted(records.items()):
        where = f"step {record['step']}, phase {record['phase']}"
        who = f"rank {rank} (host {record.get('host')}, pid {record.get('pid')})"
        silent = now - record["time"]
        if silent > _SILENT_AFTER:
            lines.append(
                f"{who}: its last heartbeat is {silent:.0f} s old, from {where}: the process is "
                "stopped, or its host is gone."
            )
        elif record["step"] < newest:
            lines.append(f"{who} is behind: {where}, where others are at step {newest}.")
        elif record["phase"] != "step" and "step" in phases:
            lines.append(f"{who} is behind: {where}, where others wait in that step.")
    if not lines and size > 1:
        lines.append(f"No rank is behind: all {size} stand in the same step and phase.")
    return lines
