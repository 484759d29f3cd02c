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
from tfbig.planner.layout import Request
from tfbig.planner.plan_config import PlanConfig
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
    """Returns the sections of a run's config."""
    return [item.default_factory for item in dataclasses.fields(Config)]  # type: ignore[misc]


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
    return Request(config, cluster, software, budget(plan.tokens, config), constants)


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
        count = config.run.global_batch // forwards
        if "microbatches" in given and count != parallel.microbatches:
            raise UserError(
                f"--microbatch_size={plan.microbatch_size} makes {count} microbatches, and"
                f" --microbatches={parallel.microbatches}: leave one of them out."
            )
        values["microbatches"] = count
    return replace_fields(config, values)


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
