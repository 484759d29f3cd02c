"""Runs a pipeline schedule's own list of operations on a clock. TensorFlow-free."""

import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainers.pipeline_schedule import all_orders


@dataclass(frozen=True)
class Timeline:
    """What a schedule makes of its passes' durations.

    Args:
      seconds: from the first operation to the last, over all ranks.
      busy: seconds each rank computes.
      transfers: seconds each rank spends sending.
    """

    seconds: float
    busy: tuple[float, ...]
    transfers: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Share of the time in which the busiest rank computes nothing."""
        return 1 - max(self.busy) / self.seconds


@dataclass(frozen=True)
class StageTimes:
    """Durations of one microbatch, by stage, in seconds."""

    forward: Sequence[float]
    backward: Sequence[float]


def run_schedule(
    schedule: str,
    num_ranks: int,
    num_microbatches: int,
    times: StageTimes,
    num_chunks: int = 1,
    transfer: float = 0.0,
    overlaps: bool = False,
    active_microbatches: int = 0,
) -> Timeline:
    """Returns when the ranks work and when all is done.

    Args:
      schedule: of trainers/pipeline_schedule.py.
      num_ranks: p.
      num_microbatches: m.
      times: of each of the p x v stages.
      num_chunks: v.
      transfer: seconds of a hidden state's way to the next rank.
      overlaps: whether the sender computes on meanwhile.
      active_microbatches: of the schedule.

    >>> run_schedule("1f1b", 4, 8, StageTimes([1.0] * 4, [2.0] * 4)).seconds
    33.0
    """

    def simulate(count: int) -> Timeline:
        return _simulate(
            schedule, num_ranks, count, times, num_chunks, transfer, overlaps, active_microbatches
        )

    # Once the pipeline is full, it repeats itself; a long step is its beginning and repetitions.
    period = active_microbatches or num_ranks
    begun = 2 * max(num_ranks, period) + num_microbatches % period
    if num_microbatches <= begun + period:
        return simulate(num_microbatches)
    first, second = simulate(begun), simulate(begun + period)
    repeats = (num_microbatches - begun) / period

    def extend(a: float, b: float) -> float:
        return a + (b - a) * repeats

    return Timeline(
        extend(first.seconds, second.seconds),
        tuple(map(extend, first.busy, second.busy)),
        tuple(map(extend, first.transfers, second.transfers)),
    )


class Operation(NamedTuple):
    """One pass of one microbatch through one stage.

    Args:
      rank: that does it.
      duration: its place among the durations, forward passes by stage, then backward passes.
      place: of what it needs, among all arrivals.
      following: place of what it makes; -1 at the ends of the model.
    """

    rank: int
    duration: int
    place: int
    following: int


@functools.lru_cache(maxsize=64)
def _operations(
    schedule: str,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int,
    active_microbatches: int,
) -> tuple[Operation, ...]:
    """Returns all ranks' operations, each one behind those that it waits for."""
    orders = all_orders(schedule, num_ranks, num_microbatches, num_chunks, active_microbatches)
    num_stages = num_ranks * num_chunks

    def place_of(kind: int, stage: int, microbatch: int) -> int:
        inside = 0 <= stage < num_stages
        return (kind * num_stages + stage) * num_microbatches + microbatch if inside else -1

    # What enters the first stage is there, and so is what the last one goes back from.
    ready = {place_of(0, 0, index) for index in range(num_microbatches)}
    ready |= {place_of(1, num_stages - 1, index) for index in range(num_microbatches)}
    done, next_of = [], [0] * num_ranks
    waiting = deque(range(num_ranks))
    while waiting:
        rank = waiting.popleft()
        for work in orders[rank][next_of[rank] :]:
            kind = int(work.kind == "backward")
            stage = work.chunk * num_ranks + rank
            place = place_of(kind, stage, work.microbatch)
            if place not in ready:
                break
            next_of[rank] += 1
            following = stage - 1 if kind else stage + 1
            made = place_of(kind, following, work.microbatch)
            done.append(Operation(rank, kind * num_stages + stage, place, made))
            ready.add(made)
            peer = following % num_ranks
            if made >= 0 and peer != rank and peer not in waiting:
                waiting.append(peer)
    assert all(next_of[rank] == len(orders[rank]) for rank in range(num_ranks)), next_of
    return tuple(done)


def _simulate(
    schedule: str,
    num_ranks: int,
    num_microbatches: int,
    times: StageTimes,
    num_chunks: int,
    transfer: float,
    overlaps: bool,
    active_microbatches: int,
) -> Timeline:
    durations = (*times.forward, *times.backward)
    arrived = [0.0] * (len(durations) * num_microbatches)
    clock, busy, sent = [0.0] * num_ranks, [0.0] * num_ranks, [0.0] * num_ranks
    waits = 0.0 if overlaps else transfer
    operations = _operations(schedule, num_ranks, num_microbatches, num_chunks, active_microbatches)
    for rank, duration_of, place, following in operations:
        duration, now, ready = durations[duration_of], clock[rank], arrived[place]
        now = (now if now > ready else ready) + duration
        busy[rank] += duration
        if following >= 0:
            arrived[following] = now + transfer
            now += waits
            sent[rank] += waits
        clock[rank] = now
    return Timeline(max(clock), tuple(busy), tuple(sent))
