"""What --best chooses from: meshes, microbatches, schedules, ways to need less. TF-free.

What is left out takes as long as something else here, or longer, and needs as much memory or more:
- `mirrored` and `multi_worker` hold and do what `horovod` does;
- GPipe's order without a limit on microbatches takes as long as 1f1b and holds them all;
- tensor groups that are neither parts nor multiples of a node: some of them cross nodes, and all
  wait for these;
- a limit on interleaved microbatches above p: waves of p end as often and leave no gaps.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from tfbig.planner.closed_form import Lines, Passes
from tfbig.planner.layout import Request, sharding_flags
from tfbig.planner.network import Line, ends_of_pipelines, line_of, neighbours
from tfbig.planner.step_time import mesh_of
from trainers.activations import is_blockwise
from trainers.mesh import PLACEMENTS

GROUP = "group"  # group_N, N still to be chosen


class State(NamedTuple):
    """Where a layout's state lies.

    Args:
      strategy: of trainers/__init__.py.
      level: of ZeRO.
      offloads: whether optimizer state lies on the host.
    """

    strategy: str
    level: int
    offloads: bool


def divisors(number: int) -> list[int]:
    """Returns the divisors, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def degrees(request: Request) -> Iterator[tuple[int, int]]:
    """Yields (pipeline, tensor) degrees that model and cluster allow."""
    model, devices = request.config.model, request.cluster.num_devices
    node = min(request.cluster.devices_per_node, devices)
    for tensor in divisors(devices):
        whole = model.num_heads % tensor == 0 and model.hidden_dim % tensor == 0
        if not whole or (node % tensor and tensor % node):
            continue
        for pipeline in divisors(devices // tensor):
            if pipeline <= model.num_layers:
                yield pipeline, tensor


def strategies(request: Request) -> tuple[str, ...]:
    """Returns the strategies that differ in what they hold, those first that should win a tie."""
    parallel = request.config.parallel
    if parallel.pipeline_parallel_degree * parallel.tensor_parallel_degree > 1:
        return ("pipeline",)
    return ("horovod", "pipeline") if request.data_size > 1 else ("single", "horovod", "pipeline")


@dataclasses.dataclass(frozen=True)
class Shape:
    """A mesh, places of its ranks and a size of microbatches.

    Args:
      mesh: the plainest layout of the mesh: 1f1b, nothing sharded, recomputed or offloaded.
      lines: of the places.
      placement: of the places.
      microbatches: of a step.
      shared: whether tensor groups share positions.
    """

    mesh: Request
    lines: Lines
    placement: str
    microbatches: int
    shared: bool

    @functools.cached_property
    def request(self) -> Request:
        """The plainest layout."""
        return self.mesh.with_parallel(
            placement_strategy=self.placement,
            microbatches=self.microbatches,
            sequence_parallel=self.shared,
        )


def meshes(request: Request) -> Iterator[tuple[Request, int]]:
    """Yields the plainest layout of each mesh, and the samples of a replica's step."""
    for pipeline, tensor in degrees(request):
        replicas = request.cluster.num_devices // pipeline // tensor
        samples, rest = divmod(request.config.run.global_batch, replicas)
        if rest:
            continue
        mesh = request.with_parallel(
            **PLAIN, pipeline_parallel_degree=pipeline, tensor_parallel_degree=tensor
        )
        yield mesh.with_parallel(strategy=strategies(mesh)[0]), samples


def shapes(request: Request) -> Iterator[Shape]:
    """Yields each shape."""
    for mesh, samples in meshes(request):
        for (placement, lines), count, shared in itertools.product(
            places(mesh).items(), divisors(samples), sharing(mesh)
        ):
            yield Shape(mesh, lines, placement, count, shared)


def sharing(mesh: Request) -> tuple[bool, ...]:
    """Returns whether tensor groups can share positions: no, or both."""
    tensor = mesh.config.parallel.tensor_parallel_degree
    return (
        (False, True) if tensor > 1 and mesh.config.data.sequence_length % tensor == 0 else (False,)
    )


PLAIN = {
    "placement_strategy": "cluster",
    "pipeline": "1f1b",
    "num_chunks": 2,
    "active_microbatches": 0,
    "partition": "",
    "sequence_parallel": False,
    "shard_optimizer_state": False,
    "shard_gradients": False,
    "shard_parameters": False,
    "activation_checkpointing": "none",
    "offload_activations": False,
    "offload_optimizer_state": False,
}


def places(request: Request) -> dict[str, Lines]:
    """Returns the placements of a mesh that are no slower than another on every axis."""
    parallel = request.config.parallel
    sizes = {
        "D": request.data_size,
        "P": parallel.pipeline_parallel_degree,
        "T": parallel.tensor_parallel_degree,
    }
    names = {order: name for name, order in PLACEMENTS.items()}
    found: dict[str, tuple[Lines, Line]] = {}
    seen = set()
    for order in map("".join, itertools.permutations("DPT")):
        # Axes of one rank make no difference, and neither do axes within one node.
        long = tuple(letter for letter in order if sizes[letter] > 1)
        if long in seen or (found and request.cluster.num_nodes == 1):
            continue
        seen.add(long)
        name = names.get(order, order)
        placed = request.with_parallel(placement_strategy=name)
        mesh = mesh_of(placed.config, request.cluster.num_devices, request.software)
        cluster = request.cluster
        lines = (
            line_of(cluster, mesh, "data"),
            line_of(cluster, mesh, "tensor"),
            neighbours(cluster, mesh),
        )
        mine = (lines, ends_of_pipelines(cluster, mesh))
        if any(_as_good(other, mine) for other in found.values()):
            continue
        found = {key: other for key, other in found.items() if not _as_good(mine, other)}
        found[name] = mine
        if request.software.name != "tfbig":
            break  # others' places are their own
    return {name: lines for name, (lines, _) in found.items()}


def _as_good(one: tuple[Lines, Line], other: tuple[Lines, Line]) -> bool:
    """Returns whether no axis of one placement is slower than the other's."""
    pairs = zip((*one[0], one[1]), (*other[0], other[1]), strict=True)
    return all(a.bandwidth >= b.bandwidth and a.latency <= b.latency for a, b in pairs)


def chunk_counts(shape: Shape) -> range:
    """Returns the chunks that an interleaved pipeline can have."""
    config = shape.mesh.config
    ranks = config.parallel.pipeline_parallel_degree
    if ranks == 1 or shape.microbatches == 1:
        return range(0)  # one microbatch meets nobody on its way
    return range(2, config.model.num_layers // ranks + 1)


def states(request: Request) -> Iterator[State]:
    """Yields where the state of a shape's layouts can lie."""
    can_move = request.cluster.device.host_bandwidth > 0
    most = 1 if request.config.parallel.pipeline_parallel_degree > 1 else 3
    for strategy, level, offloads in itertools.product(
        strategies(request), range(most + 1), (False, True)
    ):
        if offloads and not (level and can_move):
            continue
        # A level that nobody shares is none in vain: what is kept in which precision differs, too.
        yield State(strategy, level, offloads)


def savings(request: Request) -> Iterator[tuple[str, bool]]:
    """Yields (recomputation, whether its inputs wait on the host)."""
    yield "none", False
    if not is_blockwise(request.config):  # which keeps no scores anyway
        yield "attention", False
    yield "block", False
    yield GROUP, False
    if request.cluster.device.host_bandwidth > 0:
        yield "block", True


def larger_groups(request: Request) -> list[str]:
    """Returns recomputations that move fewer inputs to the host than `block` does."""
    most = request.config.model.num_layers // request.config.parallel.pipeline_parallel_degree
    return [f"group_{2**power}" for power in range(1, most.bit_length()) if 2**power <= most]


def limits(request: Request, how: Passes) -> range:
    """Returns the limits on microbatches in flight that make a difference."""
    parallel = request.config.parallel
    ranks, count = parallel.pipeline_parallel_degree, parallel.microbatches
    if ranks == 1 or how.offloads:  # what waits on the host needs no limit
        return range(0)
    return range(1, min(count, ranks) if how.chunks == 1 else min(count - 1, ranks) + 1)


def limited(how: Passes, active: int) -> Iterator[Passes]:
    """Yields the orders of passes under a limit; in waves GPipe's can be faster than 1f1b."""
    names = (how.schedule, "simple") if how.chunks == 1 else (how.schedule,)
    for name in names:
        yield how._replace(schedule=name, active=active)


def fields_of(state: State, how: Passes) -> dict[str, object]:
    """Returns the fields of a config's parallel section."""
    return {
        **sharding_flags(state.level),
        "strategy": state.strategy,
        "offload_optimizer_state": state.offloads,
        "activation_checkpointing": how.recompute,
        "offload_activations": how.offloads,
        "pipeline": how.schedule,
        "num_chunks": max(2, how.chunks),
        "active_microbatches": how.active,
    }
