"""In which order a pipeline rank runs its microbatches, as pure functions. TensorFlow-free.

p ranks hold v chunks each; stage g = chunk * p + rank is the g-th of the p * v parts the model is
cut into. Sources: GPipe (arXiv 1811.06965), 1F1B (PipeDream, arXiv 1806.03377; the flushing form
and the interleaved one in Megatron-LM, arXiv 2104.04473, section 2.2).
"""

import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple

SCHEDULES = ("simple", "1f1b", "interleaved")


class Work(NamedTuple):
    """One microbatch's pass through one chunk."""

    kind: Literal["forward", "backward"]
    chunk: int  # of the rank, 0 ... v - 1
    microbatch: int


def compute_order(
    schedule: str,
    num_ranks: int,
    rank: int,
    num_microbatches: int,
    num_chunks: int = 1,
    active_microbatches: int = 0,
) -> list[Work]:
    """Returns what a pipeline rank computes, in order.

    Args:
      schedule: "simple": all forwards, then all backwards; "1f1b": a backward as soon as there is
        one; "interleaved": 1f1b over several chunks a rank.
      num_ranks: p.
      rank: place on the pipeline axis.
      num_microbatches: m.
      num_chunks: v; 1 unless interleaved.
      active_microbatches: most microbatches a rank may hold activations of; 0 means no limit
        beyond the schedule's own.

    >>> [f"{w.kind[0]}{w.microbatch}" for w in compute_order("1f1b", 2, 0, 3)]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    assert schedule in SCHEDULES and num_chunks >= 1 and num_microbatches >= 1
    assert num_chunks == 1 or schedule == "interleaved"
    limit = active_microbatches or num_microbatches
    if num_chunks == 1 and schedule != "simple":
        # The limit shortens the warm-up, which needs no flush.
        num_warmup = min(num_ranks - 1 - rank, num_microbatches, limit - 1)
        forwards, backwards = _passes(num_microbatches, 1, num_microbatches)
        return _alternate(forwards, backwards, num_warmup)
    # The limit cuts the microbatches into waves; each ends with its last backward. All ranks use
    # the same waves, so the widest rank's need decides.
    if limit >= num_microbatches:
        return _wave(schedule, num_ranks, rank, num_microbatches, num_chunks)
    if limit >= _widest(schedule, num_ranks, num_microbatches, num_chunks):
        return _wave(schedule, num_ranks, rank, num_microbatches, num_chunks)
    order = []
    for first in range(0, num_microbatches, limit):
        count = min(limit, num_microbatches - first)
        wave = _wave(schedule, num_ranks, rank, count, num_chunks)
        order += [work._replace(microbatch=work.microbatch + first) for work in wave]
    return order


@functools.lru_cache(maxsize=64)  # all ranks ask the same
def _widest(schedule: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> int:
    """Returns the microbatches in flight of the rank that has most, without a limit."""
    return max(
        microbatches_in_flight(_wave(schedule, num_ranks, rank, num_microbatches, num_chunks))
        for rank in range(num_ranks)
    )


def forward_order(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> list[Work]:
    """Returns what every pipeline rank computes when there is no backward pass."""
    return list(_passes(num_microbatches, num_chunks, num_ranks)[0])


def microbatches_in_flight(order: Sequence[Work], chunk: int | None = None) -> int:
    """Returns the most microbatches whose activations a rank holds at once.

    Args:
      order: of `compute_order`.
      chunk: counts this chunk's activations only; None counts microbatches with any.
    """
    pending: dict[int, int] = {}  # chunks with activations, by microbatch
    most = 0
    for work in order:
        if chunk is not None and work.chunk != chunk:
            continue
        held = pending.get(work.microbatch, 0) + (1 if work.kind == "forward" else -1)
        assert held >= 0, work
        if held:
            pending[work.microbatch] = held
            most = max(most, len(pending))
        else:
            del pending[work.microbatch]
    return most


@functools.lru_cache(maxsize=64)
def all_orders(
    schedule: str,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int = 1,
    active_microbatches: int = 0,
) -> tuple[tuple[Work, ...], ...]:
    """Returns what every pipeline rank computes, in order; arguments as of `compute_order`."""
    return tuple(
        tuple(
            compute_order(
                schedule, num_ranks, rank, num_microbatches, num_chunks, active_microbatches
            )
        )
        for rank in range(num_ranks)
    )


@functools.lru_cache(maxsize=1024)
def stages_in_flight(
    schedule: str,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int = 1,
    active_microbatches: int = 0,
) -> tuple[int, ...]:
    """Returns, by stage, the most microbatches whose activations are held at once.

    Args:
      schedule: as in `compute_order`.
      num_ranks: p.
      num_microbatches: m.
      num_chunks: v.
      active_microbatches: as in `compute_order`.

    >>> stages_in_flight("1f1b", 4, 1000)
    (4, 3, 2, 1)
    """
    if schedule != "simple" or active_microbatches:
        num_microbatches = enough(num_ranks, num_microbatches, active_microbatches)
    orders = all_orders(schedule, num_ranks, num_microbatches, num_chunks, active_microbatches)
    held: list[int] = [0] * (num_ranks * num_chunks)
    for rank, order in enumerate(orders):
        parts: list[list[Work]] = [[] for _ in range(num_chunks)]
        for work in order:
            parts[work.chunk].append(work)
        for chunk, part in enumerate(parts):
            held[chunk * num_ranks + rank] = microbatches_in_flight(part)
    return tuple(held)


def enough(num_ranks: int, num_microbatches: int, active_microbatches: int) -> int:
    """Returns with how many microbatches as many are in flight as with all.

    Once the pipeline is full it repeats itself after each p microbatches, or after each wave.
    """
    period = active_microbatches or num_ranks
    return min(num_microbatches, 3 * max(num_ranks, period) + num_microbatches % period)


def bubble_fraction(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> float:
    """Returns the share of a step in which a rank waits, by the formula.

    Exact for "simple" and "1f1b", and for "interleaved" where p divides m.

    Source: arXiv 2104.04473, section 2.2: (p - 1) / (v m) of the ideal time.

    >>> bubble_fraction(4, 8)
    0.2727272727272727
    """
    return (num_ranks - 1) / (num_chunks * num_microbatches + num_ranks - 1)


def _wave(
    schedule: str, num_ranks: int, rank: int, num_microbatches: int, num_chunks: int
) -> list[Work]:
    if schedule == "simple":
        forwards, backwards = _passes(num_microbatches, 1, num_microbatches)
        return [*forwards, *backwards]
    # Interleaving wants groups of p microbatches. A group that isn't full is made so with
    # microbatches that don't exist, whose work is then left out: what remains keeps its order, so
    # it needs nothing that isn't there before it.
    padded = -(-num_microbatches // num_ranks) * num_ranks
    forwards, backwards = _passes(padded, num_chunks, num_ranks)
    num_warmup = min((num_ranks - 1 - rank) * 2 + (num_chunks - 1) * num_ranks, len(forwards))
    order = _alternate(forwards, backwards, num_warmup)
    return [work for work in order if work.microbatch < num_microbatches]


@functools.lru_cache(maxsize=16)  # all ranks go through the same
def _passes(
    num_microbatches: int, num_chunks: int, group: int
) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
    """Returns all forwards and all backwards of a rank, each in its order.

    Microbatches go through the chunks in groups, so that a group comes back to chunk 1 when the
    last rank has finished chunk 0.
    """
    forwards: list[Work] = []
    backwards: list[Work] = []
    for first in range(0, num_microbatches, group):
        part = range(first, min(first + group, num_microbatches))
        for chunk in range(num_chunks):
            forwards += [Work("forward", chunk, index) for index in part]
        for chunk in reversed(range(num_chunks)):
            backwards += [Work("backward", chunk, index) for index in part]
    return tuple(forwards), tuple(backwards)


def _alternate(forwards: Sequence[Work], backwards: Sequence[Work], num_warmup: int) -> list[Work]:
    """Returns some forwards first, then one forward and one backward in turn, then the rest."""
    order = list(forwards[:num_warmup])
    for index, work in enumerate(forwards[num_warmup:]):
        order += [work, backwards[index]]
    return [*order, *backwards[len(forwards) - num_warmup :]]
