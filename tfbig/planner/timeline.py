"""Runs a pipeline schedule's own list of operations on a clock. TensorFlow-free."""

import functools
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


# (rank, place of its duration, place of what it needs, place of what it makes), of one pass of a
# microbatch. Durations stand by stage, forward before backward; arrivals too, and by microbatch.
# What the ends of the model make has a place of its own.
Operation = tuple[int, int, int, int]


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
    num_stages, count = num_ranks * num_chunks, num_microbatches
    nowhere = 2 * num_stages * count
    is_ready = bytearray(nowhere + 1)
    # What enters the first stage is there, and so is what the last one goes back from.
    is_ready[:count] = is_ready[nowhere - count : nowhere] = bytes([1]) * count
    done: list[Operation] = []
    next_of = [0] * num_ranks
    waiting = deque(range(num_ranks))
    while waiting:
        rank = waiting.popleft()
        order, index = orders[rank], next_of[rank]
        while index < len(order):
            work = order[index]
            stage = work.chunk * num_ranks + rank
            is_back = work.kind == "backward"
            duration = num_stages + stage if is_back else stage
            place = duration * count + work.microbatch
            if not is_ready[place]:
                break
            index += 1
            is_end = stage == (0 if is_back else num_stages - 1)
            made = nowhere if is_end else place + (-count if is_back else count)
            done.append((rank, duration, place, made))
            is_ready[made] = 1
            peer = (rank - 1 if is_back else rank + 1) % num_ranks
            if not is_end and peer != rank and peer not in waiting:
                waiting.append(peer)
        next_of[rank] = index
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
    nowhere = len(durations) * num_microbatches
    arrived = [0.0] * (nowhere + 1)
    clock, busy, sent = [0.0] * num_ranks, [0.0] * num_ranks, [0.0] * num_ranks
    waits = 0.0 if overlaps else transfer
    for rank, duration_of, place, made in _operations(
        schedule, num_ranks, num_microbatches, num_chunks, active_microbatches
    ):
        duration, now, ready = durations[duration_of], clock[rank], arrived[place]
        now = (now if now > ready else ready) + duration
        busy[rank] += duration
        if made != nowhere:
            arrived[made] = now + transfer
            now += waits
            sent[rank] += waits
        clock[rank] = now
    return Timeline(max(clock), tuple(busy), tuple(sent))
