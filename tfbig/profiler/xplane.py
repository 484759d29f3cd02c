"""Reads XPlane captures: the split of a captured step, and its operators' times.

The format is that of TensorFlow's own messages (tensorflow/tsl/profiler/protobuf/xplane.proto).
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tfbig.profiler.intervals import clip, split_time, union_length
from tfbig.step_spans import StepSpans

_PICOSECONDS = 1e-12
_HOST_OPERATOR = re.compile(r"([\w./\-]+):(\w+)")
# Operations that hold others, wait for others, or feed: no computation of the step's own.
_NO_COMPUTATION = re.compile(
    r"(Stateful)?PartitionedCall|(Stateless)?(While|If|Case)|_?(While|If|Case)|NoOp|Timestamp"
    r"|_(Host)?(Send|Recv)|(Eager)?PyFunc|IteratorGetNext.*|Horovod.*|Collective.*|Nccl.*"
)
COMPUTATION = ("backward", "forward", "optimizer")
REST = "launch and idle"
_MOST_OPERATORS = 40


class Operator(NamedTuple):
    """One run of one operation."""

    name: str  # in the graph, with scopes
    type: str
    start: float  # seconds in the capture
    stop: float
    on_device: bool  # whether a GPU ran it
    kernel: str = ""  # what the GPU calls it


def phase_of(name: str) -> str:
    """Returns what an operation's name says of its part in the step.

    >>> phase_of("gradient_tape/gpt/dense/MatMul")
    'backward'
    """
    if name.startswith("optimizer/") or "/optimizer/" in name:
        return "optimizer"
    # Inside custom gradients TensorFlow's names begin with the function's.
    return "backward" if "gradient" in name else "forward"


def _load(path: Path) -> Any:
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    space.ParseFromString(path.read_bytes())
    return space


def _events(plane: Any) -> Iterator[tuple[str, Any, float, float, Any]]:
    """Yields (name, line, start, stop, event) of a plane, in seconds."""
    names = {key: value.name for key, value in plane.event_metadata.items()}
    for line in plane.lines:
        base = line.timestamp_ns * 1000
        for event in line.events:
            start = base + event.offset_ps
            yield (
                names.get(event.metadata_id, ""),
                line,
                start * _PICOSECONDS,
                (start + event.duration_ps) * _PICOSECONDS,
                event,
            )


def step_event(space: Any, name: str) -> tuple[float, float] | None:
    """Returns start and stop of the annotation around a captured step, None without it."""
    for plane in space.planes:
        if plane.name.startswith("/host"):
            for found, _, start, stop, _ in _events(plane):
                if found == name:
                    return start, stop
    return None


def operators(space: Any) -> list[Operator]:
    """Returns what ran: the GPU's kernels where there are any, else the host's operations."""
    on_device = [op for plane in space.planes for op in _device_operators(plane)]
    if on_device:
        return on_device
    found = []
    for plane in space.planes:
        if not plane.name.startswith("/host"):
            continue
        for name, _, start, stop, _ in _events(plane):
            match = _HOST_OPERATOR.fullmatch(name.split(" ")[0])
            if match and not _NO_COMPUTATION.fullmatch(match[2]):
                found.append(Operator(match[1], match[2], start, stop, False))
    return found


def _device_operators(plane: Any) -> Iterator[Operator]:
    """Yields a GPU's kernels and copies by the operation that launched them."""
    if not plane.name.startswith("/device:GPU"):
        return
    stats = {key: value.name for key, value in plane.stat_metadata.items()}
    for kernel, line, start, stop, event in _events(plane):
        if not line.name.startswith("Stream"):
            continue  # lines such as "XLA Ops" repeat the streams' kernels
        values = {
            stats.get(stat.metadata_id): stat.str_value or stats.get(stat.ref_value, "")
            for stat in event.stats
        }
        name, _, kind = (values.get("tf_op") or kernel).partition(":")
        yield Operator(name, kind or kernel, start, stop, True, kernel)


def _kind_of(operator: Operator) -> str:
    # By the kernel: the operation that launched it may be any, and is named by the model's scopes.
    kernel = operator.kernel.lower()
    if "nccl" in kernel:
        return "collective"
    if "memcpyh2d" in kernel:
        return "host to device"
    return phase_of(operator.name)


def operator_table(found: list[Operator], most: int = _MOST_OPERATORS) -> list[dict[str, Any]]:
    """Returns the costliest types of operation: type, phase, count, seconds; costliest first."""
    totals: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    for operator in found:
        total = totals[operator.type, _kind_of(operator)]
        total[0] += 1
        total[1] += operator.stop - operator.start
    ordered = sorted(totals.items(), key=lambda item: -item[1][1])[:most]
    return [
        {"type": type, "phase": phase, "count": int(count), "seconds": seconds}
        for (type, phase), (count, seconds) in ordered
    ]


def summary_of(
    path: Path, annotation: str, begin: float, spans: StepSpans
) -> dict[str, Any] | None:
    """Returns what a captured step was made of, ready for JSON.

    Args:
      path: the capture.
      annotation: name of the event around the step.
      begin: seconds since 1970 at which that event began.
      spans: of the step, on the same clock.

    Returns:
      wall_seconds; split, seconds by kind that sum to it, of which "exposed communication" is that
      during which nothing computed; hidden_communication; operators. None when the annotation is
      missing.
    """
    space = _load(path)
    event = step_event(space, annotation)
    if event is None:
        return None
    start = event[0] + spans.start - begin
    stop = start + spans.seconds
    found = [op for op in operators(space) if op.stop > start and op.start < stop]
    split, hidden = _split(found, spans, start, stop)
    return {
        "wall_seconds": spans.seconds,
        "split": split,
        "hidden_communication": hidden,
        "operators": operator_table(found),
    }


def _split(
    found: list[Operator], spans: StepSpans, start: float, stop: float
) -> tuple[dict[str, float], float]:
    kinds: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for operator in found:
        kinds[_kind_of(operator)].append((operator.start, operator.stop))
    intervals: dict[str, np.ndarray] = {
        kind: np.array(kinds[kind]).reshape(-1, 2) for kind in (*COMPUTATION, "host to device")
    }
    # What a strategy notes itself: passes that it drives one by one, and collectives in flight.
    in_flight: list[np.ndarray] = [np.array(kinds["collective"]).reshape(-1, 2)]
    for name, pairs in spans.spans.items():
        if name not in COMPUTATION:
            in_flight.append(pairs - spans.start + start)
    communication = clip(np.concatenate(in_flight), start, stop)
    computing = clip(np.concatenate([intervals[kind] for kind in COMPUTATION]), start, stop)
    both = union_length(np.concatenate([communication, computing]))
    hidden = union_length(communication) + union_length(computing) - both
    split = split_time(
        {
            **_in_order(intervals),
            "exposed communication": communication,
            "data wait": np.array([[start, start + spans.data_wait]]),
        },
        start,
        stop,
        REST,
    )
    return split, max(0.0, hidden)


def _in_order(intervals: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {kind: intervals[kind] for kind in (*COMPUTATION, "host to device")}
