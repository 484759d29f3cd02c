"""From flag values to a request. TensorFlow-free."""

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

from tfbig import presets
from tfbig.config import Config, RunConfig, count_parameters, replace_fields, section_values
from tfbig.errors import UserError
from tfbig.planner.cluster import Cluster, load_constants, make_cluster
from tfbig.planner.flops import chinchilla_tokens, tokens_per_step
from tfbig.planner.layout import Request, trains
from tfbig.planner.memory import MemoryOptions
from tfbig.planner.plan_config import PlanConfig, PlannedOptions
from tfbig.planner.software import Software, software_called


def constants_path() -> str:
    """Returns where `tfbig plan --measure` and --check keep what they found on this machine.

    TFBIG_CONSTANTS names another file.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.environ.get("TFBIG_CONSTANTS") or os.path.join(cache, "tfbig", "constants.json")


def own_constants(path: str = "") -> dict[str, Any]:
    """Returns the packaged constants with a user's over them: `path`, else the usual file's."""
    usual = constants_path()
    return load_constants(path or (usual if os.path.exists(usual) else ""))


def run_sections() -> list[type]:
    """Returns the sections of a run's config, and what this version's train lacks."""
    sections: list[type] = [item.default_factory for item in dataclasses.fields(Config)]  # type: ignore[misc]
    if not trains("activation_checkpointing"):
        sections.append(PlannedOptions)
    return sections


def request_of(values: Mapping[str, Any]) -> Request:
    """Returns the request that flag values describe.

    Raises:
      UserError: no such preset, cluster, program or number.
    """
    plan = PlanConfig(**section_values(PlanConfig, dict(values)))
    _check_numbers(plan)
    names = {f.name for item in dataclasses.fields(Config) for f in _fields_of(item)}
    config = replace_fields(
        presets.preset(values.get("preset", RunConfig.preset)),
        {name: value for name, value in values.items() if name in names},
    )
    constants = own_constants(plan.constants)
    if plan.kg_co2e_per_kwh:
        constants["carbon"]["kg_co2e_per_kwh"] = plan.kg_co2e_per_kwh
    software, cluster = software_called(plan.software), _cluster(plan, constants)
    config = _settled(config, plan, cluster, software, given=set(values))
    request = Request(
        config, cluster, _options(config, values, software), software, 0.0, constants
    ).with_options()
    return dataclasses.replace(request, tokens=budget(plan.tokens, config))


def _check_numbers(plan: PlanConfig) -> None:
    names = (
        "microbatch_size",
        "devices_per_node",
        "network_gbps",
        "network_fraction",
        "dollars_per_node_hour",
        "kg_co2e_per_kwh",
    )
    for name in names:
        value = getattr(plan, name)
        if not 0 <= value < math.inf:
            raise UserError(f"--{name}={value} must be at least 0 and finite.")
    if plan.network_fraction > 1:
        raise UserError(f"--network_fraction={plan.network_fraction} must be at most 1.")
    if plan.show < 1:
        raise UserError(f"--show={plan.show} must be at least 1.")


def _fields_of(item: dataclasses.Field) -> tuple[dataclasses.Field, ...]:
    return dataclasses.fields(item.default_factory)  # type: ignore[arg-type]


def _cluster(plan: PlanConfig, constants: Mapping[str, Any]) -> Cluster:
    cluster = make_cluster(plan.cluster, constants, plan.devices_per_node, plan.network_gbps)
    changes: dict[str, Any] = {}
    if plan.network_fraction:
        changes["network_fraction"] = plan.network_fraction
    if plan.dollars_per_node_hour:
        changes |= {"dollars_per_node_hour": plan.dollars_per_node_hour, "price_date": "yours"}
    return dataclasses.replace(cluster, **changes)


def _settled(
    config: Config, plan: PlanConfig, cluster: Cluster, software: Software, given: set[str]
) -> Config:
    """Returns the config with what follows from cluster and program filled in."""
    parallel, values = config.parallel, dict[str, object]()
    model_ranks = parallel.pipeline_parallel_degree * parallel.tensor_parallel_degree
    if "strategy" not in given:
        alone = "horovod" if cluster.num_devices > 1 else "single"
        values["strategy"] = "pipeline" if model_ranks > 1 else alone
    if software.attention != "own":
        values["attention"] = "blockwise"
    if plan.microbatch_size:
        forwards = plan.microbatch_size * max(1, cluster.num_devices // model_ranks)
        if config.run.global_batch % forwards:
            raise UserError(
                f"--global_batch={config.run.global_batch} is no multiple of"
                f" --microbatch_size={plan.microbatch_size} x"
                f" {forwards // plan.microbatch_size} replicas."
            )
        values["microbatches"] = config.run.global_batch // forwards
    return replace_fields(config, values)


def _options(config: Config, values: Mapping[str, Any], software: Software) -> MemoryOptions:
    options = MemoryOptions.of(config)
    if not trains("activation_checkpointing"):
        planned = PlannedOptions(**section_values(PlannedOptions, dict(values)))
        flags = (planned.shard_optimizer_state, planned.shard_gradients, planned.shard_parameters)
        level = max((i for i, is_on in enumerate(flags, start=1) if is_on), default=0)
        options = dataclasses.replace(
            options,
            sharding_level=level,  # type: ignore[arg-type]
            activation_checkpointing=planned.activation_checkpointing,
            offload_activations=planned.offload_activations,
            offload_optimizer_state=planned.offload_optimizer_state,
        )
    kernels = "tensorflow" if software.name == "tfbig" else "fused"
    return dataclasses.replace(options, kernels=kernels)  # type: ignore[arg-type]


def budget(text: str, config: Config) -> float:
    """Returns the tokens that --tokens names.

    Raises:
      UserError: it is neither a number nor one of the words.

    >>> budget("300e9", Config())
    300000000000.0
    """
    if text == "run":
        return float(config.run.steps * tokens_per_step(config))
    if text == "chinchilla":
        return chinchilla_tokens(count_parameters(config.model))
    try:
        tokens = float(text)
    except ValueError:
        tokens = 0.0
    if not 0 < tokens < 1e18:
        raise UserError(f"--tokens={text} is neither a number, such as 300e9, nor run, chinchilla.")
    return tokens
