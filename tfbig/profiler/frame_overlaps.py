"""How long which events ran at given times: what correlates samples of hosts with events."""

from collections.abc import Iterable, Sequence

import numpy as np

from tfbig.profiler.metrics_readers import TraceEvent


def seconds_by_name(
    events: Iterable[TraceEvent], intervals: np.ndarray, selected: Sequence[str]
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Returns the seconds of the events that overlap intervals, once for each that they overlap.

    Args:
      events: of all ranks.
      intervals: (n, 2) nanoseconds since 1970.
      selected: names or lanes of events that count; empty means all.

    Returns:
      Of the events that are no steps by lane, the same by name, and of the steps by name.
    """
    lanes: dict[str, float] = {}
    names: dict[str, float] = {}
    steps: dict[str, float] = {}
    for event in events:
        if selected and event.event_name not in selected and event.event_phase not in selected:
            continue
        found = (intervals[:, 1] >= event.start_time) & (intervals[:, 0] <= event.end_time)
        seconds = float(found.sum()) * event.duration / 1e9
        if not seconds:
            continue
        if event.event_name.startswith("Step:"):
            steps[event.event_name] = steps.get(event.event_name, 0.0) + seconds
            continue
        lanes[event.event_phase] = lanes.get(event.event_phase, 0.0) + seconds
        names[event.event_name] = names.get(event.event_name, 0.0) + seconds
    return lanes, names, steps


def relative(seconds: dict[str, float]) -> dict[str, float]:
    """Returns seconds over the largest of them."""
    largest = max(seconds.values(), default=1.0)
    return {name: value / largest for name, value in seconds.items()}
