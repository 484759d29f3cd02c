"""Runs a pipeline schedule's own list of operations on a clock. TensorFlow-free."""

import functools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

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


Operation = tuple[int, int, int]  # 0 forward or 1 backward, stage, microbatch


@functools.lru_cache(maxsize=64)
def _operations(
    schedule: str,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int,
    active_microbatches: int,
) -> tuple[tuple[Operation, ...], ...]:
    """Returns what each rank does, in order."""
    orders = all_orders(schedule, num_ranks, num_microbatches, num_chunks, active_microbatches)
    return tuple(
        tuple(
            (int(work.kind == "backward"), work.chunk * num_ranks + rank, work.microbatch)
            for work in order
        )
        for rank, order in enumerate(orders)
    )


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
    orders = _operations(schedule, num_ranks, num_microbatches, num_chunks, active_microbatches)
    last = num_ranks * num_chunks - 1
    durations = (times.forward, times.backward)
    nowhere = math.inf  # when what an operation needs has not been sent yet
    arrived = [
        [[nowhere] * num_microbatches for _ in range(last + 1)] for _ in durations
    ]  # by kind, stage and microbatch
    arrived[0][0] = [0.0] * num_microbatches
    arrived[1][last] = [0.0] * num_microbatches
    clock, busy, sent = [0.0] * num_ranks, [0.0] * num_ranks, [0.0] * num_ranks
    place = [0] * num_ranks
    waiting = deque(range(num_ranks))
    while waiting:
        rank = waiting.popleft()
        order, now = orders[rank], clock[rank]
        for index in range(place[rank], len(order)):
            kind, stage, microbatch = order[index]
            ready = arrived[kind][stage][microbatch]
            if ready is nowhere:
                break
            duration = durations[kind][stage]
            now = (now if now > ready else ready) + duration
            busy[rank] += duration
            place[rank] += 1
            following = stage - 1 if kind else stage + 1
            if 0 <= following <= last:
                arrived[kind][following][microbatch] = now + transfer
                if not overlaps:
                    now += transfer
                    sent[rank] += transfer
                peer = following % num_ranks
                if peer != rank and peer not in waiting:
                    waiting.append(peer)
        clock[rank] = now
    assert all(place[rank] == len(orders[rank]) for rank in range(num_ranks)), place
    return Timeline(max(clock), tuple(busy), tuple(sent))
