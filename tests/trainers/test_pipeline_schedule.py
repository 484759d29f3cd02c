"""Schedules and programs for every (p, m, v) in a range: complete, in order, no hang, bounded."""

import itertools

import pytest

from trainers.pipeline_program import (
    Exchange,
    Program,
    idle_share,
    plan_programs,
    simulated_seconds,
)
from trainers.pipeline_schedule import (
    Work,
    bubble_fraction,
    compute_order,
    forward_order,
    microbatches_in_flight,
    stages_in_flight,
)

PIPELINES = [
    *itertools.product(("simple", "1f1b"), range(1, 9), (1,)),
    *itertools.product(("interleaved",), range(2, 7), (2, 3, 4)),
]
MICROBATCHES = range(1, 15)


def orders_of(schedule: str, p: int, m: int, v: int = 1, active: int = 0) -> list[list[Work]]:
    return [compute_order(schedule, p, rank, m, v, active) for rank in range(p)]


def passes_needed(m: int, v: int) -> set[Work]:
    kinds = ("forward", "backward")
    return {Work(k, c, i) for k, c, i in itertools.product(kinds, range(v), range(m))}


def check_dependencies(programs: list[Program]) -> None:
    """Runs the programs and asserts that each pass finds what it needs."""
    p, v = programs[0].num_ranks, programs[0].num_chunks
    here: list[set] = [set() for _ in programs]
    made: list[set] = [set() for _ in programs]
    done = [0] * p
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while done[rank] < len(program.actions):
                action = program.actions[done[rank]]
                if isinstance(action, Exchange):
                    other = programs[action.peer]
                    theirs = other.actions[done[action.peer] :][:1]
                    if not theirs or not isinstance(theirs[0], Exchange):
                        break
                    if theirs[0].peer != rank:
                        break
                    assert action.send or action.receive, "an exchange of nothing"
                    for source, target, message in (
                        (rank, action.peer, action.send),
                        (action.peer, rank, action.receive),
                    ):
                        if message is not None:
                            made[source].remove(message)
                            here[target].add(message)
                    done[action.peer] += 1
                else:
                    stage = action.chunk * p + rank
                    is_end = stage == (0 if action.kind == "forward" else p * v - 1)
                    if not is_end:
                        here[rank].remove((action.kind, stage, action.microbatch))
                    following = stage + (1 if action.kind == "forward" else -1)
                    if 0 <= following < p * v:
                        made[rank].add((action.kind, following, action.microbatch))
                done[rank] += 1
                moved = True
    assert done == [len(program.actions) for program in programs], "the programs hang"
    assert not any(here) and not any(made), "a message was made and not used"


@pytest.mark.parametrize(("schedule", "p", "v"), PIPELINES)
def test_each_microbatch_passes_once_in_order_and_nothing_hangs(schedule, p, v):
    for m in MICROBATCHES:
        orders = orders_of(schedule, p, m, v)
        for order in orders:
            assert len(order) == 2 * m * v and set(order) == passes_needed(m, v)
            for chunk, index in itertools.product(range(v), range(m)):
                forward = order.index(Work("forward", chunk, index))
                assert forward < order.index(Work("backward", chunk, index))
        programs = plan_programs(orders, v)
        for program, order in zip(programs, orders, strict=True):
            assert [a for a in program.actions if isinstance(a, Work)] == order
        check_dependencies(programs)


@pytest.mark.parametrize(("schedule", "p", "v"), PIPELINES)
def test_bubble_equals_the_formula(schedule, p, v):
    for m in MICROBATCHES:
        programs = plan_programs(orders_of(schedule, p, m, v), v)
        share, formula = idle_share(programs, m * v), bubble_fraction(p, m, v)
        if schedule == "interleaved" and m % p:
            assert share >= formula - 1e-12, "a group that is not full idles more"
        else:
            assert share == pytest.approx(formula, abs=1e-12)


@pytest.mark.parametrize(("schedule", "p", "v"), PIPELINES)
def test_durations_other_than_planned_do_not_hang(schedule, p, v):
    for m in MICROBATCHES:
        programs = plan_programs(orders_of(schedule, p, m, v), v)
        for times in ((1.0, 1.0, 0.5), (3.0, 1.0, 0.0)):
            assert simulated_seconds(programs, *times) > 0


@pytest.mark.parametrize("p", range(1, 9))
def test_in_flight_bound_of_1f1b(p):
    for m in MICROBATCHES:
        for rank, order in enumerate(orders_of("1f1b", p, m)):
            assert microbatches_in_flight(order) == min(m, p - rank)


@pytest.mark.parametrize(("p", "v"), list(itertools.product(range(2, 7), (2, 3, 4))))
def test_in_flight_bound_of_interleaved(p, v):
    # arXiv 2205.05198, section 4.2.3: the first rank holds (1 + (p - 1) / (p v)) times what 1f1b
    # holds, p whole stages: p v + p - 1 activations of chunks.
    order = compute_order("interleaved", p, 0, 4 * p, v)
    pending = most = 0
    for work in order:
        pending += 1 if work.kind == "forward" else -1
        most = max(most, pending)
    assert most == p * v + p - 1


@pytest.mark.parametrize("schedule", ["simple", "1f1b", "interleaved"])
@pytest.mark.parametrize(("p", "m"), list(itertools.product((2, 3, 4), (1, 4, 7, 8))))
@pytest.mark.parametrize("active", [1, 2, 3, 6])
def test_active_microbatches_caps_what_is_held(schedule, p, m, active):
    v = 2 if schedule == "interleaved" else 1
    orders = orders_of(schedule, p, m, v, active)
    for order in orders:
        assert set(order) == passes_needed(m, v) and len(order) == 2 * m * v
        assert microbatches_in_flight(order) <= active
    check_dependencies(plan_programs(orders, v))


@pytest.mark.parametrize(("p", "m", "v"), list(itertools.product((1, 2, 4), (1, 2, 3), (1, 2))))
def test_forward_alone(p, m, v):
    if p == 1 and v > 1:
        return
    check_dependencies(plan_programs([forward_order(p, m, v)] * p, v))


def test_a_wrong_order_is_found():
    orders = orders_of("1f1b", 2, 2, active=1)
    orders[1] = orders[1][2:] + orders[1][:2]  # the last rank wants microbatch 1 first
    with pytest.raises(AssertionError):
        plan_programs(orders)


def test_steady_exchanges_carry_both_directions():
    programs = plan_programs(orders_of("1f1b", 2, 8))
    both = [a for a in programs[0].actions if isinstance(a, Exchange) and a.send and a.receive]
    assert len(both) == 7  # all but the first activation and the last gradient


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
@pytest.mark.parametrize("num_microbatches", [1, 5, 16, 19, 37])
def test_stages_in_flight_are_those_of_all_microbatches(num_chunks, num_microbatches):
    schedule = "interleaved" if num_chunks > 1 else "1f1b"
    for num_ranks in (2, 3, 4):
        orders = [
            compute_order(schedule, num_ranks, rank, num_microbatches, num_chunks)
            for rank in range(num_ranks)
        ]
        expected = tuple(
            microbatches_in_flight(orders[stage % num_ranks], stage // num_ranks)
            for stage in range(num_ranks * num_chunks)
        )
        assert stages_in_flight(schedule, num_ranks, num_microbatches, num_chunks) == expected
