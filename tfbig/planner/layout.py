"""One layout, checked by the code that trains, and everything predicted of it. TF-free."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfbig.config import Config, replace_fields
from tfbig.errors import UserError
from tfbig.planner.cluster import Cluster
from tfbig.planner.economics import Economics, economics
from tfbig.planner.flops import conventions, tokens_per_step
from tfbig.planner.memory import MemoryOptions, RankMemory, peak, predict_memory
from tfbig.planner.plan_config import PlannedOptions
from tfbig.planner.software import Software
from tfbig.planner.step_time import StepModel, StepTime
from tfbig.validation import validate
from trainers import check_strategy
from trainers.mesh import make_mesh
from trainers.partition import Partition, choose_partition
from trainers.validate import derive_microbatch_size


@dataclass(frozen=True)
class Request:
    """A question to the planner.

    Args:
      config: of the run, its layout included.
      cluster: that runs it.
      options: of memory.
      software: that runs it.
      tokens: to train on.
      constants: of `load_constants`.
    """

    config: Config
    cluster: Cluster
    options: MemoryOptions
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

    def with_fields(self, **values: object) -> "Request":
        """Returns the request with other fields of its config."""
        return dataclasses.replace(self, config=replace_fields(self.config, values))

    def with_options(self, **values: Any) -> "Request":
        """Returns the request with other memory options; bytes a parameter follow."""
        options = dataclasses.replace(self.options, **values)
        state = None
        if self.software.optimizer is not None:
            state = self.software.state(self.config, options.sharding_level)
        return dataclasses.replace(self, options=dataclasses.replace(options, state=state))


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
    def fits(self) -> bool:
        """Whether every rank's memory suffices."""
        return self.peak_bytes <= self.request.cluster.device.memory_bytes

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


def trains(option: str) -> bool:
    """Returns whether this version's train has a flag of that name."""
    sections = (item.default_factory for item in dataclasses.fields(Config))
    return any(
        option in {field.name for field in dataclasses.fields(section)}  # type: ignore[arg-type]
        for section in sections
    )


def check_layout(request: Request) -> None:
    """Checks that train would accept the layout, by train's own checks.

    Raises:
      UserError: as train would, or that train has no such option.
    """
    config, parallel = request.config, request.config.parallel
    validate(config)
    check_strategy(config)
    make_mesh(
        request.cluster.num_devices,
        parallel.pipeline_parallel_degree,
        parallel.tensor_parallel_degree,
        parallel.placement_strategy,
    )
    derive_microbatch_size(config.run.global_batch, request.data_size, parallel.microbatches)
    level = request.options.sharding_level
    if level >= 2 and parallel.pipeline_parallel_degree > 1:
        flag = "shard_gradients" if level == 2 else "shard_parameters"
        raise UserError(
            f"--{flag} needs --pipeline_parallel_degree=1, not {parallel.pipeline_parallel_degree}:"
            " a pipeline adds up gradients over its microbatches; --shard_optimizer_state serves."
        )
    if request.software.name == "tfbig":
        _check_options(request.options)


def _check_options(options: MemoryOptions) -> None:
    asked = {
        "shard_optimizer_state": options.sharding_level >= 1,
        "shard_gradients": options.sharding_level >= 2,
        "shard_parameters": options.sharding_level >= 3,
        "activation_checkpointing": options.activation_checkpointing != "none",
        "offload_activations": options.offload_activations,
        "offload_optimizer_state": options.offload_optimizer_state,
    }
    assert set(asked) <= {field.name for field in dataclasses.fields(PlannedOptions)}
    for option, is_on in asked.items():
        if is_on and not trains(option):
            raise UserError(
                f"--{option}: this version's train has no such option. Leave it out, or plan"
                " another program, e.g. --software=megatron-bf16."
            )


def make_plan(request: Request, check: bool = True) -> Plan:
    """Returns what is predicted of one layout, whether it fits or not.

    Raises:
      UserError: train would refuse it.
    """
    if check:
        check_layout(request)
    config, options = request.config, request.options
    recompute = options.activation_checkpointing
    partition = choose_partition(config, request.microbatch_size, recompute)
    overhead = request.software.overhead(request.cluster)
    memory = predict_memory(config, request.data_size, options, overhead, partition)
    step = StepModel(config, request.cluster, options, request.software, partition).predict()
    money = economics(config, request.cluster, step.total, request.tokens, request.constants)
    return Plan(request, partition, tuple(memory), step, money)
