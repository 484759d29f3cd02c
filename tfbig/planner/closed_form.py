"""Step time of a layout in microseconds, to rank thousands. TensorFlow-free.

Stages are taken as equal, and the schedule by its formula; `make_plan` follows with the partition
and the operations that train would run.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from tfbig.config import Config
from tfbig.planner.kernels import Cost, Kernels
from tfbig.planner.layout import Request
from tfbig.planner.memory import MemoryOptions
from tfbig.planner.network import Line, line_of, neighbours
from tfbig.planner.offload import Offload
from tfbig.planner.step_time import mesh_of
from trainers.activations import COMPUTE_BYTES, group_size
from trainers.state_bytes import stage_counts
from trainers.validate import num_chunks

Lines = tuple[Line, Line, Line]  # of the data axis, the tensor axis, and a pair of pipeline ranks
Costs = tuple[Cost, Cost, Cost]  # of a block, the embedding, the head
Key = tuple[object, ...]
Value = TypeVar("Value")


class Passes(NamedTuple):
    """How a step's passes run.

    Args:
      recompute: as in trainers/activations.py.
      offloads: whether recomputation's inputs wait on the host.
      schedule: of trainers/pipeline_schedule.py.
      chunks: of the model on each rank.
      active: most microbatches in flight; 0 leaves it to the schedule.
    """

    recompute: str = "none"
    offloads: bool = False
    schedule: str = "1f1b"
    chunks: int = 1
    active: int = 0


class RoughStep:
    """Closed formulas of the layouts of one mesh and one size of microbatch.

    Args:
      request: a layout of the mesh.
      size: microbatches of a step, and whether tensor groups share positions.
      lines: of the mesh.
      costs: returns what one microbatch costs, by recomputation.
      known: what other steps of the same model and cluster have found.
    """

    def __init__(
        self,
        request: Request,
        size: tuple[int, bool],
        lines: Lines,
        costs: Callable[[str], Costs],
        known: dict[Key, Any],
    ) -> None:
        self._request, self._costs, self._known = request, costs, known
        self._microbatches, shared = size
        self._data, tensor, pair = lines
        config, software = request.config, request.software
        parallel, model = config.parallel, config.model
        self._ranks = parallel.pipeline_parallel_degree
        element = COMPUTE_BYTES[parallel.precision]
        self._rows = config.run.global_batch // (self._data.size * self._microbatches)
        elements = self._rows * config.data.sequence_length * model.embed_dim
        summed = 4 if software.name == "tfbig" else element
        if shared:
            self._sum = tensor.all_gather(elements * element)
            self._sum += tensor.all_gather(elements * summed)
        else:
            self._sum = tensor.all_reduce(elements * summed)
        self._sent = 0.0
        if self._ranks > 1 and not software.overlaps_pipeline:
            num_bytes = float(elements * element)
            if shared or software.scatters_hidden:
                num_bytes /= tensor.size
            self._sent = 2 * (pair.latency + num_bytes / pair.bandwidth)
        self._mesh = (parallel.strategy, self._ranks, tensor.size, self._data.size)
        self._parameters = self._remembered("trained", lambda: _trained(config)) / self._ranks

    def _remembered(self, what: object, make: Callable[[], Value]) -> Value:
        key = (what, self._mesh)
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def least(self, most_chunks: int) -> float:
        """Returns seconds below which no passes are, with so many chunks or fewer."""
        block, embedding, head = self._costs("none")
        each = block.forward + block.backward + 4 * self._sum
        each *= self._request.config.model.num_layers
        each += embedding.forward + embedding.backward + head.forward + head.backward
        each += 2 * self._sum
        times = self._microbatches + (self._ranks - 1) / most_chunks
        return times * (each / self._ranks + self._sent)

    def passes(self, how: Passes) -> float:
        """Returns the seconds of all microbatches' passes, stages taken as equal."""
        block, embedding, head = self._costs(how.recompute)
        layers, ranks, chunks = self._request.config.model.num_layers, self._ranks, how.chunks
        again = bool(group_size(how.recompute))
        forward = block.forward + 2 * self._sum
        backward = block.backward + block.again + (4 if again else 2) * self._sum
        each, ends = forward + backward, embedding.forward + embedding.backward
        ends += head.forward + head.backward + 2 * self._sum
        # The partition evens out embedding and head, but blocks are whole.
        largest = math.ceil(layers / (ranks * chunks))
        stage = max((layers * each + ends) / ranks, chunks * largest * each)
        if how.offloads:
            offload = self._offload(self._request, 0, False, how.recompute)
            stage += sum(offload.waiting(1, forward, backward)) * layers / ranks
        times = microbatch_times(
            how.schedule, ranks, self._microbatches, chunks, how.active, backward / each
        )
        return times * (stage + chunks * self._sent)

    def state(self, level: int, offloads: bool, passes: float) -> float:
        """Returns the seconds of gradients' and weights' collectives, and of the update.

        Args:
          level: of ZeRO.
          offloads: whether optimizer state lies on the host.
          passes: seconds, beside which some programs gather weights.
        """
        data, software, count = self._data, self._request.software, self._microbatches
        many = count > 1
        update, summed, gathered = self._remembered(
            (level, offloads, count if level == 3 and offloads else many),
            lambda: self._state_parts(self._whole(), level, offloads),
        )
        if data.size == 1:
            return update
        if level == 0:
            return update + data.all_reduce(summed)
        gather, scatter = data.all_gather(gathered), data.all_gather(summed)
        if level < 3:  # at level 2 each microbatch's gradients are summed anew
            return update + gather + scatter * (count if level == 2 else 1)
        comm = count * (2 * gather + scatter)
        return update + (max(0.0, comm - passes) if software.overlaps_data else comm)

    def _whole(self) -> Request:
        return self._request.with_parallel(microbatches=self._microbatches)

    def _state_parts(
        self, request: Request, level: int, offloads: bool
    ) -> tuple[float, float, float]:
        """Returns an update's seconds, and bytes of gradients and weights on their way."""
        parameters = self._parameters
        state = request.software.state(request.config, level)
        wire = parameters * state.summed, parameters * state.gathered
        offload = self._offload(request, level, offloads, "none")
        on_host = offload.update(round(parameters))
        if on_host is not None:
            return on_host + offload.of_state(round(parameters)), *wire
        device = request.cluster.device
        moved = parameters / (self._data.size if level else 1) * (2 * state.optimizer + 18.0)
        moved += parameters * (state.weight + state.gradient)
        return moved / device.memory_bandwidth / device.bandwidth, *wire

    def _offload(self, request: Request, level: int, of_state: bool, recompute: str) -> Offload:
        options = MemoryOptions(
            sharding_level=level,  # type: ignore[arg-type]
            activation_checkpointing=recompute,
            offload_activations=bool(group_size(recompute)),
            offload_optimizer_state=of_state,
        )
        state = request.software.state(request.config, level)
        return Offload(request.config, request.cluster, options, state, self._rows, self._data.size)


class RoughTimes:
    """Closed formulas of step times over layouts of one model on one cluster."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._lines: dict[tuple[int, int, str], Lines] = {}
        self._costs: dict[Key, Costs] = {}
        self._known: dict[Key, Any] = {}

    def seconds(self, request: Request) -> float:
        """Returns the step's time by closed formulas."""
        parallel, options = request.config.parallel, request.options
        size = parallel.microbatches, parallel.sequence_parallel
        costs = functools.partial(self._costs_of, request, request.microbatch_size, size[1])
        step = RoughStep(request, size, self._lines_of(request), costs, {})
        chunks = num_chunks(request.config)
        is_cut = parallel.pipeline_parallel_degree > 1
        passes = step.passes(
            Passes(
                options.activation_checkpointing,
                options.offload_activations,
                parallel.pipeline if is_cut else "1f1b",
                chunks,
                parallel.active_microbatches,
            )
        )
        return passes + step.state(options.sharding_level, options.offload_optimizer_state, passes)

    def step(self, mesh: Request, size: tuple[int, bool], lines: Lines) -> RoughStep:
        """Returns the closed formulas of a mesh and a size of microbatches; see RoughStep."""
        count, shared = size
        rows = mesh.config.run.global_batch // (mesh.data_size * count)
        costs = functools.partial(self._costs_of, mesh, rows, shared)
        return RoughStep(mesh, size, lines, costs, self._known)

    def _lines_of(self, request: Request) -> Lines:
        parallel, cluster = request.config.parallel, request.cluster
        pipeline, tensor = parallel.pipeline_parallel_degree, parallel.tensor_parallel_degree
        key = (pipeline, tensor, parallel.placement_strategy)
        if key not in self._lines:
            mesh = mesh_of(request.config, cluster.num_devices, request.software)
            self._lines[key] = (
                line_of(cluster, mesh, "data"),
                line_of(cluster, mesh, "tensor"),
                neighbours(cluster, mesh),
            )
        return self._lines[key]

    def _costs_of(self, request: Request, rows: int, shared: bool, recompute: str) -> Costs:
        # A group's blocks are made again one by one, as single ones are.
        mode = recompute if recompute in ("none", "attention") else "block"
        parallel = request.config.parallel
        count = request.config.run.global_batch // (rows * request.data_size)
        key = (
            parallel.strategy,
            count > 1,
            parallel.tensor_parallel_degree,
            rows,
            shared,
            mode,
            parallel.attention,
            parallel.precision,
        )
        if key not in self._costs:
            cut = request.with_parallel(sequence_parallel=shared, microbatches=count)
            config = cut.config
            kernels = Kernels(config, rows, request.cluster.device, request.software, mode)
            self._costs[key] = (kernels.block(), kernels.embedding(), kernels.head())
        return self._costs[key]


def _trained(config: Config) -> int:
    """Returns the trained parameters of a tensor rank in all stages, a tied table in both ends."""
    last = config.model.num_layers
    if config.parallel.pipeline_parallel_degree == 1:
        return stage_counts(config, (0, last), True, True).trained
    halves = ((0, last // 2), True, False), ((last // 2, last), False, True)
    return sum(stage_counts(config, *half).trained for half in halves)


def microbatch_times(
    schedule: str, ranks: int, count: int, chunks: int, active: int = 0, backward: float = 2 / 3
) -> float:
    """Returns the time of a step's passes in those of one microbatch on one rank.

    arXiv 2104.04473, section 2.2: (p - 1) / v microbatches' time is waited. The rest is what the
    orders of trainers/pipeline_schedule.py take on a clock.

    Args:
      schedule: of trainers/pipeline_schedule.py.
      ranks: p.
      count: m.
      chunks: v.
      active: most microbatches in flight; 0 leaves it to the schedule.
      backward: share of a microbatch's time that its backward pass takes.

    >>> microbatch_times("1f1b", 4, 8, 1), microbatch_times("1f1b", 4, 8, 1, 3)
    (11.0, 16.0)
    """
    if ranks == 1:
        return float(count)
    limit = active or count
    if schedule == "1f1b":
        if limit >= min(ranks, count):
            return float(count + ranks - 1)
        # With a shorter warm-up each microbatch waits for p - A others' turns.
        return float(count * (ranks - limit + 1) - (limit - 1) * (ranks - limit - 1))
    # Longer than this nothing is in flight, so that such a limit makes no waves.
    longest = count if schedule == "simple" else 2 * ranks - 1
    if limit >= min(count, longest):
        return _wave(schedule, ranks, count, chunks, backward)
    waves, rest = divmod(count, limit)
    whole = waves * _wave(schedule, ranks, limit, chunks, backward)
    return whole + (_wave(schedule, ranks, rest, chunks, backward) if rest else 0.0)


def _wave(schedule: str, ranks: int, count: int, chunks: int, backward: float) -> float:
    """Returns the time of microbatches that begin and end with an empty pipeline."""
    if schedule == "simple":
        return float(count + ranks - 1)
    # A last group of fewer than p microbatches leaves gaps, before each chunk but the first; those
    # of forward passes are filled by the group before it.
    gaps = (math.ceil(count / ranks) * ranks - count) * (chunks - 1) / chunks
    if count > ranks:
        gaps *= backward
    return count + gaps + (ranks - 1) / chunks
