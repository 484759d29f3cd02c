"""In which order a pipeline rank runs its microbatches, as pure functions. TensorFlow-free.

p ranks hold v chunks each; stage g = chunk * p + rank is the g-th of the p * v parts the model is
cut into. Sources: GPipe (arXiv 1811.06965), 1F1B (PipeDream, arXiv 1806.03377; flushing variant
in Megatron-LM, arXiv 2104.04473, section 2.2), interleaved 1F1B (the same, section 2.2.2).
"""

from typing import Literal, NamedTuple

SCHEDULES = ("simple", "1f1b", "interleaved")


class Work(NamedTuple):
    """One microbatch's pass through one chunk."""

    kind: Literal["forward", "backward"]
    chunk: int  # of the rank, 0 ... v - 1
    microbatch: int


def _passes(
    num_ranks: int, num_microbatches: int, num_chunks: int, group: int
) -> tuple[list[Work], list[Work]]:
    """Returns all forwards and all backwards of a rank, each in its order.

    Microbatches go through the chunks in groups, so that a group comes back to chunk 1 when the
    last rank has finished chunk 0.
    """
    forwards, backwards = [], []
    for first in range(0, num_microbatches, group):
        part = range(first, min(first + group, num_microbatches))
        for chunk in range(num_chunks):
            forwards += [Work("forward", chunk, index) for index in part]
        for chunk in reversed(range(num_chunks)):
            backwards += [Work("backward", chunk, index) for index in part]
    return forwards, backwards


def _one_forward_one_backward(
    forwards: list[Work], backwards: list[Work], num_warmup: int
) -> list[Work]:
    order = list(forwards[:num_warmup])
    for index, work in enumerate(forwards[num_warmup:]):
        order += [work, backwards[index]]
    return order + backwards[len(forwards) - num_warmup :]


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
    if schedule == "simple":
        order = []
        for first in range(0, num_microbatches, limit):
            part = range(first, min(first + limit, num_microbatches))
            order += [Work("forward", 0, index) for index in part]
            order += [Work("backward", 0, index) for index in part]
        return order
    if num_chunks == 1:
        forwards, backwards = _passes(num_ranks, num_microbatches, 1, num_microbatches)
        num_warmup = min(num_ranks - 1 - rank, num_microbatches, limit - 1)
        return _one_forward_one_backward(forwards, backwards, num_warmup)
    forwards, backwards = _passes(num_ranks, num_microbatches, num_chunks, num_ranks)
    num_warmup = min((num_ranks - 1 - rank) * 2 + (num_chunks - 1) * num_ranks, len(forwards))
    return _one_forward_one_backward(forwards, backwards, num_warmup)


def forward_order(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> list[Work]:
    """Returns what every pipeline rank computes when there is no backward pass."""
    return _passes(num_ranks, num_microbatches, num_chunks, num_ranks)[0]
