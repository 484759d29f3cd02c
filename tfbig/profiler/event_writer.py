"""Writes a rank's events as Chrome trace files, which Perfetto and smdebug's readers open.

Only complete events ("X"), nested within a lane, and counters are written: both viewers agree on
these. The times are on rank 0's clock.
"""

import io
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from tfbig.profiler import layout

_MAX_BYTES, _MAX_SECONDS = 10 << 20, 60.0
_FLUSH_SECONDS = 2.0


class EventWriter:
    """Appends events of one rank.

    Args:
      profiler_dir: of the run.
      rank: of this process.
      hostname: of its host.
      clock_offset: seconds that this rank's clock is ahead of rank 0's.
    """

    def __init__(
        self, profiler_dir: Path, rank: int, hostname: str, clock_offset: float = 0.0
    ) -> None:
        self._profiler_dir, self._rank = profiler_dir, rank
        # smdebug's names are cut at underscores.
        self._worker = f"{os.getpid()}-{hostname.replace('_', '-')}"
        self._offset = clock_offset
        self._file: io.BufferedWriter | None = None
        self._base = self._last_end = 0.0  # seconds since 1970 on rank 0's clock
        self._opened = self._flushed = 0.0
        self._lanes: dict[str, int] = {}

    def write(
        self,
        lane: str,
        name: str,
        start: float,
        seconds: float,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """Appends one event.

        Args:
          lane: what it belongs to; a process in Chrome's terms, with a thread a rank.
          name: of the event.
          start: seconds since 1970 on this rank's clock.
          seconds: how long it took.
          arguments: what else is known.
        """
        details = {"rank": self._rank, **(arguments or {})}
        self._append(lane, name, "X", start, details, seconds)

    def write_counter(self, name: str, at: float, values: Mapping[str, float]) -> None:
        """Appends the values of a counter at a time, seconds since 1970 on this rank's clock."""
        self._append(f"rank {self._rank} counters", name, "C", at, values, 0.0)

    def close(self) -> None:
        """Ends the open file and gives it its final name."""
        if self._file is None:
            return
        self._file.write(b"\n]\n")
        self._file.close()
        end = round(self._last_end * 1e6)
        folder = layout.events_dir(self._profiler_dir) / layout.hour_of(self._last_end)
        folder.mkdir(parents=True, exist_ok=True)
        self._path.rename(folder / f"{end}_{self._worker}_pythontimeline.json")
        self._file = None

    def _append(
        self,
        lane: str,
        name: str,
        phase: str,
        start: float,
        details: Mapping[str, Any],
        seconds: float,
    ) -> None:
        start -= self._offset
        now = time.monotonic()
        if self._file is not None and (
            now - self._opened > _MAX_SECONDS or self._file.tell() > _MAX_BYTES
        ):
            self.close()
        if self._file is None:
            self._open(start, now)
        assert self._file is not None
        number = self._lanes.get(lane)
        if number is None:
            number = self._lanes[lane] = len(self._lanes) + 1
            self._describe(number, lane)
        event = {
            "name": name,
            "ph": phase,
            "pid": number,
            "tid": self._rank,
            "ts": max(0, round((start - self._base) * 1e6)),
            "args": details,
        }
        if phase == "X":
            event["dur"] = max(0, round(seconds * 1e6))
        self._put(event)
        self._last_end = max(self._last_end, start + seconds)
        if now - self._flushed > _FLUSH_SECONDS:
            self._file.flush()
            self._flushed = now

    def _open(self, start: float, now: float) -> None:
        # An event may have begun before the first that is written, such as initialisation.
        self._base, self._last_end = start - 3600.0, start
        self._opened = self._flushed = now
        self._lanes = {}
        folder = layout.events_dir(self._profiler_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{round(start * 1e6)}_{self._worker}_pythontimeline.json.tmp"
        self._file = open(self._path, "wb")
        self._file.write(b"[\n")
        self._is_empty = True
        base = {"start_time_since_epoch_in_micros": round(self._base * 1e6)}
        self._put({"name": "process_name", "ph": "M", "pid": 0, "args": base})
        self._put({"name": "process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 0}})

    def _describe(self, number: int, lane: str) -> None:
        for name, arguments in (
            ("process_name", {"name": lane}),
            ("process_sort_index", {"sort_index": number}),
        ):
            self._put({"name": name, "ph": "M", "pid": number, "args": arguments})
        thread = {"name": f"rank {self._rank}"}
        self._put(
            {"name": "thread_name", "ph": "M", "pid": number, "tid": self._rank, "args": thread}
        )

    def _put(self, event: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write((b"" if self._is_empty else b",\n") + orjson.dumps(event))
        self._is_empty = False
