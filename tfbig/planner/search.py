"""All layouts that train can run, ranked: closed formulas for all, the best simulated. TF-free."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from tfbig.config import Config
from tfbig.errors import UserError
from tfbig.planner.closed_form import rough_memory, rough_seconds
from tfbig.planner.kernels import Cost, Kernels
from tfbig.planner.layout import Plan, Request, check_layout, make_plan, sharding_flags
from tfbig.planner.network import Line, line_of, neighbours
from tfbig.planner.step_time import mesh_of
from trainers import check_strategy

LARGEST_MICROBATCH = 32
CHUNKS = (2, 3, 4, 6, 8)
SIMULATED = 20
_ROUGHLY = 1.02  # what the closed formula finds this much too large may fit all the same


@dataclass(frozen=True)
class Candidate:
    """A layout and its rough step time."""

    request: Request
    seconds: float


def divisors(number: int) -> list[int]:
    """Returns the divisors, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def degrees(request: Request) -> Iterator[tuple[int, int]]:
    """Yields (pipeline, tensor) degrees that model and cluster allow.

    A tensor group stays within a node: its collectives stand between products.
    """
    model, devices = request.config.model, request.cluster.num_devices
    node = min(request.cluster.devices_per_node, devices)
    for tensor in divisors(devices):
        whole = model.num_heads % tensor == 0 and model.hidden_dim % tensor == 0
        if not whole or tensor > node or node % tensor:
            continue
        for pipeline in divisors(devices // tensor):
            if pipeline <= model.num_layers:
                yield pipeline, tensor


def layouts(request: Request) -> Iterator[Request]:
    """Yields every layout in question, memory options left as they are.

    GPipe's order is left out: it takes as long as 1f1b and more memory.
    """
    config, devices = request.config, request.cluster.num_devices
    for pipeline, tensor in degrees(request):
        data = devices // pipeline // tensor
        samples, rest = divmod(config.run.global_batch, data)
        if rest:
            continue
        chunks = [1]
        if pipeline > 1:
            chunks += [n for n in CHUNKS if n * pipeline <= config.model.num_layers]
        for rows, num_chunks, shared in itertools.product(
            [n for n in divisors(samples) if n <= LARGEST_MICROBATCH],
            chunks,
            (False, True) if tensor > 1 else (False,),
        ):
            if shared and config.data.sequence_length % tensor:
                continue
            if num_chunks > 1 and samples // rows < pipeline:
                continue  # not one group is full
            yield request.with_parallel(
                strategy=_strategy(devices, pipeline, tensor),
                pipeline_parallel_degree=pipeline,
                tensor_parallel_degree=tensor,
                microbatches=samples // rows,
                pipeline="interleaved" if num_chunks > 1 else "1f1b",
                num_chunks=max(2, num_chunks),
                sequence_parallel=shared,
                partition="",
            )


def _strategy(devices: int, pipeline: int, tensor: int) -> str:
    if pipeline * tensor > 1:
        return "pipeline"
    return "horovod" if devices > 1 else "single"


RECOMPUTE = ("none", "attention", "block")


def sharding_levels(request: Request) -> list[int]:
    """Returns the levels of ZeRO that a layout can have."""
    if request.data_size == 1:
        return [0]
    return [0, 1] if request.config.parallel.pipeline_parallel_degree > 1 else [0, 1, 2, 3]


def with_memory(request: Request, level: int, recompute: str) -> Request:
    """Returns the layout at a level of ZeRO and with some recomputation."""
    return request.with_parallel(**sharding_flags(level), activation_checkpointing=recompute)


def lean_bytes(request: Request) -> Iterator[float]:
    """Yields what the fullest rank needs of a layout with all that needs less memory."""
    level = sharding_levels(request)[-1]
    for recompute in ("block", "none"):  # where a rank has one block, the former saves nothing
        yield roughly(with_memory(request, level, recompute))


def roughly(request: Request) -> float:
    """Returns the bytes of the first or last pipeline rank, whichever needs more."""
    overhead = request.software.overhead(request.cluster)
    return rough_memory(request.config, request.data_size, request.options, overhead)


def memory_options(request: Request) -> Iterator[Request]:
    """Yields the layout with each way of needing less, cheapest first."""
    for recompute, level in itertools.product(RECOMPUTE, sharding_levels(request)):
        yield with_memory(request, level, recompute)


def is_taken(config: Config) -> bool:
    """Returns whether the strategy takes the configuration."""
    try:
        check_strategy(config)
    except UserError:
        return False
    return True


def candidates(request: Request) -> list[Candidate]:
    """Returns all layouts that roughly fit, each with its rough time, fastest first."""
    found = []
    rough = RoughTimes(request)
    capacity = request.cluster.device.memory_bytes
    too_large: set[tuple[object, ...]] = set()  # layouts whose smaller microbatches do not fit
    for layout in layouts(request):
        kind = _without_microbatches(layout)
        if kind in too_large:
            continue
        if all(need > _ROUGHLY * capacity for need in lean_bytes(layout)):
            too_large.add(kind)
            continue
        fitting: dict[str, int] = {}
        for option in memory_options(layout):
            parallel = option.config.parallel
            level, repeated = parallel.sharding_level, parallel.activation_checkpointing
            # What needs more of either kind of saving than suffices is slower.
            if fitting and (repeated not in fitting or level > fitting[repeated] + 1):
                continue
            if roughly(option) > _ROUGHLY * capacity or not is_taken(option.config):
                continue
            fitting.setdefault(repeated, level)
            found.append(Candidate(option, rough.seconds(option)))
    return sorted(found, key=lambda candidate: candidate.seconds)


def _without_microbatches(request: Request) -> tuple[object, ...]:
    parallel = request.config.parallel
    return (
        parallel.pipeline_parallel_degree,
        parallel.tensor_parallel_degree,
        parallel.pipeline,
        parallel.num_chunks,
        parallel.sequence_parallel,
    )


class RoughTimes:
    """Closed formulas over layouts of one model on one cluster; remembers what recurs."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._lines: dict[tuple[int, int], tuple[Line, Line, Line]] = {}
        self._costs: dict[tuple[object, ...], tuple[Cost, Cost, Cost]] = {}

    def seconds(self, request: Request) -> float:
        """Returns the step's time by closed formulas."""
        parallel = request.config.parallel
        pipeline, tensor = parallel.pipeline_parallel_degree, parallel.tensor_parallel_degree
        if (pipeline, tensor) not in self._lines:
            mesh = mesh_of(request.config, request.cluster.num_devices, request.software)
            self._lines[pipeline, tensor] = (
                line_of(request.cluster, mesh, "data"),
                line_of(request.cluster, mesh, "tensor"),
                neighbours(request.cluster, mesh),
            )
        key = (
            tensor,
            request.microbatch_size,
            parallel.sequence_parallel,
            request.options.activation_checkpointing,
            parallel.attention,
            parallel.precision,
        )
        if key not in self._costs:
            kernels = Kernels(
                request.config,
                request.microbatch_size,
                request.cluster.device,
                request.software,
                request.options.activation_checkpointing,
            )
            self._costs[key] = (kernels.block(), kernels.embedding(), kernels.head())
        return rough_seconds(
            request.config,
            request.cluster,
            request.options,
            request.software,
            self._lines[pipeline, tensor],
            self._costs[key],
        )


def best_plans(request: Request, show: int = SIMULATED) -> tuple[list[Plan], int]:
    """Returns (the fastest layouts that fit, how many were looked at).

    Raises:
      UserError: no layout fits, or none divides the devices and the batch.
    """
    ranked = candidates(request)
    if not ranked:
        raise UserError(_nothing_fits(request))
    plans: list[Plan] = []
    tried = 0
    for candidate in ranked:
        if tried >= SIMULATED and plans:
            break
        tried += 1
        try:
            check_layout(candidate.request)
        except UserError:
            continue  # what train refuses
        plan = make_plan(candidate.request, check=False)
        if plan.fits:
            plans.append(plan)
    if not plans:
        raise UserError(_nothing_fits(request))
    return sorted(plans, key=lambda plan: plan.step.total)[:show], len(ranked)


def _refusal(request: Request) -> str:
    """Returns why train refuses one layout, or what else may be wrong."""
    try:
        check_layout(request)
    except UserError as error:
        return f"Of one it says: {error}"
    return "Give fewer flags of the layout, or another global batch."


def _nothing_fits(request: Request) -> str:
    cluster, config = request.cluster, request.config
    possible = list(itertools.islice(layouts(request), 1))
    if not possible:
        return (
            f"no layout divides {cluster.num_devices} devices, {config.model.num_layers} blocks,"
            f" {config.model.num_heads} heads and --global_batch={config.run.global_batch}: take a"
            f" global batch that is a multiple of {cluster.num_devices}."
        )
    least = min(need for layout in layouts(request) for need in lean_bytes(layout))
    if least <= cluster.device.memory_bytes:
        return f"train takes no layout that fits {cluster.name}. {_refusal(possible[0])}"
    return (
        f"no layout of {cluster.name} fits: the leanest needs {least / 1e9:,.1f} GB a device, which"
        f" has {cluster.device.memory_bytes / 1e9:,.1f} GB. More devices, or larger ones, are"
        " needed."
    )
