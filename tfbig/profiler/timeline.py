"""The hook that notes what a rank's steps and pauses were: a row a step, and events."""

import itertools
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import psutil

from tfbig.loop import Hook, Progress
from tfbig.profiler.event_writer import EventWriter
from tfbig.profiler.host_metrics import resident_bytes
from tfbig.profiler.step_table import AXES, StepTableWriter
from tfbig.step_spans import StepSpans

TRAIN, EVALUATE = "Step:ModeKeys.TRAIN", "Step:ModeKeys.EVAL"  # as smdebug calls them
# Steps whose events are written: a process's first, then so many a second. The table has all.
_FIRST_STEPS, _STEPS_PER_SECOND = 100, 20
_PASSES = ("forward", "backward")


class TimelineHook(Hook):
    """Writes a rank's step table and events; a disk that refuses them ends the writing only.

    Args:
      table: of this rank.
      events: of this rank.
      clock_offset: seconds that this rank's clock is ahead of rank 0's.
      interval: seconds between two readings of the resident memory.
    """

    def __init__(
        self,
        table: StepTableWriter,
        events: EventWriter,
        clock_offset: float,
        interval: float,
    ) -> None:
        self._table, self._events = table, events
        self._offset, self._interval = clock_offset, interval
        self._resident, self._resident_at = 0.0, -1e9
        self._next_event, self._num_steps = 0.0, 0
        self._last_end = 0.0  # of the steps, seconds since 1970
        self._healthy = True

    def on_start(self, progress: Progress, resumed: bool) -> None:
        begin, now = psutil.Process().create_time(), time.time()
        self._event("Initialization", "Initialization", begin, now - begin)

    def on_compiled(self, seconds: float) -> None:
        self._event("Compile", "first call of the step", time.time() - seconds, seconds)

    def on_spans(self, spans: StepSpans) -> None:
        self._last_end = spans.start + spans.seconds
        if not self._healthy:
            return
        try:
            self._write_row(spans)
            self._num_steps += 1
            if spans.start >= self._next_event or self._num_steps <= _FIRST_STEPS:
                self._next_event = spans.start + 1 / _STEPS_PER_SECOND
                self._write_events(spans)
        except OSError as error:
            self._give_up(error)

    def on_evaluation(self, record: dict[str, Any]) -> None:
        seconds = record["seconds"]
        arguments = {"step_num": str(record["step"])}
        self._event(EVALUATE, EVALUATE, time.time() - seconds, seconds, arguments)

    def on_checkpoint(self, step: int, seconds: float) -> None:
        arguments = {"step_num": str(step)}
        self._event("Checkpoint", "Checkpoint", time.time() - seconds, seconds, arguments)

    def on_stop(self, progress: Progress, reason: str) -> None:
        if self._last_end:
            # The last evaluation and save lie in it and have lanes of their own.
            seconds = max(0.0, time.time() - self._last_end)
            self._event("Finalization", "Finalization", self._last_end, seconds)

    def close(self) -> None:
        """Closes the files, also after an error."""
        for file in (self._events, self._table):
            try:
                file.close()
            except OSError as error:
                if self._healthy:
                    self._give_up(error)

    def _write_row(self, spans: StepSpans) -> None:
        if spans.start - self._resident_at >= self._interval:
            self._resident, self._resident_at = resident_bytes() / 2**20, spans.start
            self._events.write_counter("ResidentMegabytes", spans.start, {"value": self._resident})
        values = {
            "start": spans.start - self._offset,
            "step": spans.step,
            "seconds": spans.seconds,
            "data_wait": spans.data_wait,
            "resident_megabytes": self._resident,
        }
        for axis, seconds in spans.communication.items():
            column = axis if axis in AXES else "other"
            values[column] = values.get(column, 0.0) + seconds
        passes = [spans.spans[name] for name in _PASSES if name in spans.spans]
        if passes:
            sums = {
                name: float((spans.spans[name][:, 1] - spans.spans[name][:, 0]).sum())
                for name in _PASSES
                if name in spans.spans
            }
            values |= sums | {"bubble": sum(stop - start for start, stop in _bubbles(passes))}
        self._table.write(values)

    def _write_events(self, spans: StepSpans) -> None:
        arguments = {"step_num": str(spans.step)}
        self._events.write(TRAIN, TRAIN, spans.start, spans.seconds, arguments)
        self._events.write("DataIterator", "GetNext", spans.start, spans.data_wait, arguments)
        passes = [spans.spans[name] for name in _PASSES if name in spans.spans]
        for start, stop in _bubbles(passes):
            self._events.write("Bubble", "Bubble", start, stop - start, arguments)
        for name, pairs in spans.spans.items():
            is_pass = name in _PASSES
            lane = name.capitalize() if is_pass else f"Collective:{name}"
            for start, stop in pairs if is_pass else _disjoint(pairs):
                self._events.write(lane, lane, start, stop - start, arguments)

    def _event(
        self, lane: str, name: str, start: float, seconds: float, arguments: Any = None
    ) -> None:
        if not self._healthy:
            return
        try:
            self._events.write(lane, name, start, seconds, arguments)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._healthy = False
        print(f"warning: this rank's steps are noted no longer: {error}", file=sys.stderr)


def _bubbles(passes: Sequence[Any]) -> list[tuple[float, float]]:
    """Returns the times between a step's passes (n, 2), each of which is idle time of the rank."""
    busy = _disjoint(np.concatenate(passes)) if passes else []
    return [(before[1], after[0]) for before, after in itertools.pairwise(busy)]


def _disjoint(pairs: Any) -> list[tuple[float, float]]:
    """Returns the union of the intervals (n, 2): a lane shows nested or disjoint events only."""
    merged: list[tuple[float, float]] = []
    for start, stop in sorted(map(tuple, pairs)):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged
