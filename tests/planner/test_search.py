"""`tfbig plan --best` against all layouts that train takes, each planned in full."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import pytest

from tfbig.errors import UserError
from tfbig.flags import Flags
from tfbig.planner import search, search_space
from tfbig.planner.closed_form import microbatch_times
from tfbig.planner.layout import Plan, Request, check_layout, make_plan, sharding_flags
from tfbig.planner.memory import predict_memory
from tfbig.planner.question import request_of, run_sections
from tfbig.planner.report import choices, explanation, launch_command, layout_line
from tfbig.planner.timeline import StageTimes, run_schedule
from trainers import STRATEGIES
from trainers.mesh import placement_order

SMALL = {
    "preset": "gpt_tiny",
    "cluster": "a100-80:4",
    "devices_per_node": 2,
    "network_gbps": 20,
    "global_batch": 4,
    "num_layers": 4,
    "embed_dim": 512,
    "num_heads": 4,
    "precision": "bfloat16",
}
PLACES = ("cluster", "spread", "PDT", "PTD", "TDP", "DTP")
RECOMPUTE = ("none", "attention", "block", "group_2", "group_3", "group_4")
ORDERS = (("1f1b", 2), ("simple", 2), ("interleaved", 2), ("interleaved", 3), ("interleaved", 4))
BOTH = (False, True)


# Where weights take most, and hosts have room; where activations do, and hosts are the devices.
CASES = {"weights": {}, "activations": {"embed_dim": 128}}


@functools.cache
def small(case: str) -> Request:
    """Returns a question of which what options save is what decides: a process takes nothing."""
    request = request_of(SMALL | CASES[case])
    cluster = request.cluster
    device = cluster.device
    if case == "activations":
        device = dataclasses.replace(device, host_bandwidth=0.0)
    nothing = dict.fromkeys(cluster.overhead, 0.0)
    cluster = dataclasses.replace(cluster, device=device, overhead=nothing)
    return dataclasses.replace(request, cluster=cluster)


def with_memory(request: Request, num_bytes: float) -> Request:
    device = dataclasses.replace(request.cluster.device, memory_bytes=num_bytes)
    cluster = dataclasses.replace(request.cluster, device=device)
    return dataclasses.replace(request, cluster=cluster)


def all_layouts(request: Request) -> Iterator[Request]:
    """Yields every layout that train takes, but for its places, by trying all values."""
    batch = request.config.run.global_batch
    degrees = [n for n in (1, 2, 4) if n <= request.cluster.num_devices]
    for strategy, pipeline, tensor, (order, chunks), count, active in itertools.product(
        STRATEGIES, degrees, degrees, ORDERS, range(1, batch + 1), range(batch)
    ):
        is_cut = pipeline > 1
        if not is_cut and (order != "1f1b" or active):
            continue  # without effect
        some = request.with_parallel(
            strategy=strategy,
            pipeline_parallel_degree=pipeline,
            tensor_parallel_degree=tensor,
            pipeline=order,
            num_chunks=chunks,
            microbatches=count,
            active_microbatches=active,
        )
        if is_taken(some):
            yield from with_savings(some)


def with_savings(request: Request) -> Iterator[Request]:
    for level, recompute, away, state, shared in itertools.product(
        range(4), RECOMPUTE, BOTH, BOTH, BOTH
    ):
        layout = request.with_parallel(
            **sharding_flags(level),
            activation_checkpointing=recompute,
            offload_activations=away,
            offload_optimizer_state=state,
            sequence_parallel=shared,
        )
        if is_taken(layout):
            yield layout


def is_taken(request: Request) -> bool:
    try:
        check_layout(request)
    except UserError:
        return False
    return True


def peak(request: Request) -> float:
    overhead = request.software.overhead(request.cluster)
    ranks = predict_memory(request.config, request.data_size, request.options, overhead)
    return max(rank.total for rank in ranks)


@functools.cache
def peaks(case: str) -> list[tuple[float, Request]]:
    found = [(peak(layout), layout) for layout in all_layouts(small(case))]
    return sorted(found, key=lambda row: row[0])


def places(layout: Request) -> list[str]:
    """Returns one placement of each order of the axes that have more than one rank."""
    parallel = layout.config.parallel
    sizes = {
        "D": layout.data_size,
        "P": parallel.pipeline_parallel_degree,
        "T": parallel.tensor_parallel_degree,
    }
    orders = {
        tuple(axis for axis in placement_order(name) if sizes[axis] > 1): name for name in PLACES
    }
    return list(orders.values())


@functools.cache
def best(case: str, share: float) -> Plan:
    """Returns what the search finds on devices that hold such a share of all layouts."""
    rows = peaks(case)
    return search.best_plans(with_memory(small(case), rows[int(share * len(rows))][0]))[0][0]


def fastest(case: str, request: Request) -> Plan:
    """Returns the best of all that fit, in each place."""
    plans = []
    for need, layout in peaks(case):
        if need > request.cluster.device.memory_bytes:
            break
        is_cut = layout.config.parallel.strategy == "pipeline"
        for place in places(layout) if is_cut else PLACES[:1]:
            here = layout.with_parallel(placement_strategy=place)
            plans.append(make_plan(dataclasses.replace(here, cluster=request.cluster), check=False))
    return min((plan for plan in plans if plan.fits), key=lambda plan: plan.step.total)


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1])
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_faster_than_the_best(case, share):
    """Devices that hold a thousandth, a hundredth and a tenth of all layouts."""
    found = best(case, share)
    brute = fastest(case, found.request)
    text = f"{layout_line(brute.request)}; {brute.request.config.parallel.placement_strategy}"
    assert found.fits and found.step.total <= 1.001 * brute.step.total, text


def test_the_cases_need_what_saves_memory():
    """Else the comparison would say nothing of it."""
    needed = set()
    for case, share in itertools.product(CASES, (0.0, 0.001, 0.01, 0.1)):
        parallel = best(case, share).request.config.parallel
        needed |= {f"ZeRO {parallel.sharding_level}", parallel.activation_checkpointing}
        needed |= {"offloads state"} if parallel.offload_optimizer_state else set()
    assert needed >= {"ZeRO 1", "ZeRO 3", "none", "block", "offloads state"}


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("count", [1, 2, 5, 8, 24])
@pytest.mark.parametrize("order", [("1f1b", 1), ("simple", 1), ("interleaved", 2)])
def test_the_formulas_of_schedules_are_those_of_their_operations(order, count, ranks):
    schedule, chunks = order
    stages = StageTimes([1 / chunks] * ranks * chunks, [2 / chunks] * ranks * chunks)
    for active in (0, *range(1, min(ranks, count))):
        seen = run_schedule(
            schedule, ranks, count, stages, chunks, active_microbatches=active
        ).seconds
        said = 3 * microbatch_times(schedule, ranks, count, chunks, active)
        assert said == pytest.approx(seen, rel=0.12), active


def test_the_launch_command_has_what_was_found():
    mesh = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "microbatches": 4}
    state = search_space.State("pipeline", 1, True)
    how = search_space.Passes("group_2", True, "1f1b", 1, 1)
    fields = search_space.fields_of(state, how) | {"placement_strategy": "PDT"}
    plan = make_plan(small("weights").with_parallel(**fields, **mesh))
    flags = (
        "--placement_strategy=PDT",
        "--activation_checkpointing=group_2",
        "--offload_activations=true",
        "--offload_optimizer_state=true",
        "--active_microbatches=1",
    )
    command = launch_command(plan)
    assert all(flag in command.split() for flag in flags), command
    words = command.split("tfbig.train ")[1].split()
    given = Flags("train", run_sections(), "").parse(words)
    parallel = plan.request.config.parallel
    assert all(getattr(parallel, name) == given[name] for name in fields if name in given)
    chosen = choices(plan.request)
    for word in ("PDT", "group_2", "1 microbatch", "host"):
        assert word in chosen and word in explanation(plan), word
