"""One layout, checked by the code that trains, and everything predicted of it. TF-free."""

import collections
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfbig.config import Config, replace_fields
from tfbig.errors import UserError
from tfbig.planner.cluster import Cluster
from tfbig.planner.economics import Economics, economics
from tfbig.planner.flops import conventions, tokens_per_step
from tfbig.planner.memory import MemoryOptions, RankMemory, peak, predict_memory
from tfbig.planner.software import Software
from tfbig.planner.step_time import StepModel, StepTime, mesh_of
from tfbig.schedule import batch_sizes
from tfbig.validation import validate
from trainers import REACH, check_strategy
from trainers.mesh import make_mesh
from trainers.partition import Partition, choose_partition
from trainers.validate import derive_microbatch_size


@dataclass(frozen=True)
class Request:
    """A question to the planner.

    Args:
      config: of the run, its layout included.
      cluster: that runs it.
      software: that runs it.
      tokens: to train on.
      constants: of `load_constants`.
    """

    config: Config
    cluster: Cluster
    software: Software
    tokens: float
    constants: Mapping[str, Any] = dataclasses.field(repr=False, compare=False)

    @property
    def data_size(self) -> int:
        """Ranks of the data axis."""
        parallel = self.config.parallel
        model_ranks = parallel.pipeline_parallel_degree * parallel.tensor_parallel_degree
        return self.cluster.num_devices // model_ranks

    @property
    def microbatch_size(self) -> int:
        """Sequences of one forward pass."""
        return self.config.run.global_batch // (self.data_size * self.config.parallel.microbatches)

    @property
    def options(self) -> MemoryOptions:
        """What the run does to need less memory, with its program's kernels and numbers."""
        options = self.software.memory_options(self.config)
        return options if self.cluster.device.host_bandwidth else options.on_host()

    def with_fields(self, **values: object) -> "Request":
        """Returns the request with other fields of its config."""
        return dataclasses.replace(self, config=replace_fields(self.config, values))

    def with_parallel(self, **values: Any) -> "Request":
        """Returns the request with other fields of its config's parallel section."""
        parallel = dataclasses.replace(self.config.parallel, **values)
        return dataclasses.replace(self, config=dataclasses.replace(self.config, parallel=parallel))


def sharding_flags(level: int) -> dict[str, bool]:
    """Returns the flags of a level of ZeRO.

    >>> sharding_flags(2)
    {'shard_optimizer_state': True, 'shard_gradients': True, 'shard_parameters': False}
    """
    names = ("shard_optimizer_state", "shard_gradients", "shard_parameters")
    return {name: level >= stage for stage, name in enumerate(names, start=1)}


@dataclass(frozen=True)
class Plan:
    """What is predicted of a layout."""

    request: Request
    partition: Partition
    memory: tuple[RankMemory, ...]
    step: StepTime
    economics: Economics

    @property
    def peak_bytes(self) -> float:
        """Of the rank that needs most."""
        return peak(self.memory).total

    @property
    def host_bytes(self) -> float:
        """What offloading puts into the memory of the node that gets most of it."""
        if not any(rank.host for rank in self.memory):
            return 0.0
        cluster = self.request.cluster
        mesh = mesh_of(self.request.config, cluster.num_devices, self.request.software)
        nodes = collections.Counter[int]()
        for rank in range(mesh.size):
            place = mesh.coordinates(rank)["pipeline"]
            nodes[rank // cluster.devices_per_node] += math.ceil(self.memory[place].host)
        return float(max(nodes.values()))

    @property
    def fits(self) -> bool:
        """Whether every rank's memory suffices, and every node's for what is offloaded."""
        cluster = self.request.cluster
        is_enough = self.peak_bytes <= cluster.device.memory_bytes
        return is_enough and self.host_bytes <= cluster.host_memory_bytes

    def step_of(self, place: int) -> StepTime:
        """Returns a pipeline rank's own parts of the step."""
        request = self.request
        return StepModel(
            request.config, request.cluster, request.options, request.software, self.partition
        ).predict(place)

    @property
    def tokens_per_second(self) -> float:
        """Of all devices."""
        return tokens_per_step(self.request.config) / self.step.total

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation as PaLM defines it (arXiv 2204.02311)."""
        return self._share(conventions(self.request.config)["palm"])

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation: recomputation counted."""
        return self._share(self.step.hardware_flops * self.request.cluster.num_devices)

    def _share(self, flops: float) -> float:
        cluster = self.request.cluster
        peak_flops = cluster.device.peak_flops(self.request.config.parallel.precision)
        return flops / self.step.total / cluster.num_devices / peak_flops


def check_layout(request: Request) -> None:
    """Checks that train would accept the layout, by train's own checks.

    Raises:
      UserError: as train would.
    """
    config, parallel = request.config, request.config.parallel
    validate(config)
    check_strategy(config)
    check_devices(config, request.cluster)
    make_mesh(
        request.cluster.num_devices,
        parallel.pipeline_parallel_degree,
        parallel.tensor_parallel_degree,
        parallel.placement_strategy,
    )
    for global_batch in batch_sizes(config.run):
        derive_microbatch_size(global_batch, request.data_size, parallel.microbatches)


def check_devices(config: Config, cluster: Cluster) -> None:
    """Checks that a strategy can use all devices of a cluster.

    Raises:
      UserError: it drives one device, or those of one host, and there are more.
    """
    strategy, devices = config.parallel.strategy, cluster.num_devices
    reach = REACH[strategy]
    if reach == "device" and devices > 1:
        raise UserError(
            f"--strategy={strategy} drives one device, and {cluster.name} has {devices}: take"
            " --strategy=horovod, or pipeline."
        )
    if reach == "host" and cluster.num_nodes > 1:
        raise UserError(
            f"--strategy={strategy} drives the devices of one host, and {cluster.name} has"
            f" {cluster.num_nodes} nodes: take --strategy=horovod, multi_worker or pipeline."
        )
    asked = config.parallel.num_devices
    processes = 1 if reach == "host" else devices // max(1, asked)
    if asked and processes * asked != devices:
        raise UserError(
            f"--num_devices={asked}: processes of so many devices do not make up the {devices} of"
            f" {cluster.name}: leave it out, or plan for as many as are used."
        )


def make_plan(request: Request, check: bool = True) -> Plan:
    """Returns what is predicted of one layout, whether it fits or not.

    Raises:
      UserError: train would refuse it.
    """
    if check:
        check_layout(request)
    return _timed(request, *_memory(request))


def plan_if_it_fits(request: Request) -> Plan | None:
    """Returns what is predicted of a layout that train takes; None where its devices are too small.

    Its step is not timed then, which takes longer than to count its memory.
    """
    partition, memory = _memory(request)
    if peak(memory).total > request.cluster.device.memory_bytes:
        return None
    plan = _timed(request, partition, memory)
    return plan if plan.fits else None


def _memory(request: Request) -> tuple[Partition, tuple[RankMemory, ...]]:
    config, options, size = request.config, request.options, request.data_size
    recompute, overhead = (
        options.activation_checkpointing,
        request.software.overhead(request.cluster),
    )
    partition = choose_partition(config, request.microbatch_size, recompute, size)
    return partition, tuple(predict_memory(config, size, options, overhead, partition))


def _timed(request: Request, partition: Partition, memory: tuple[RankMemory, ...]) -> Plan:
    config, cluster = request.config, request.cluster
    step = StepModel(config, cluster, request.options, request.software, partition).predict()
    money = economics(config, cluster, step.total, request.tokens, request.constants)
    return Plan(request, partition, memory, step, money)
