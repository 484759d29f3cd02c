"""Days, dollars, energy and carbon of a run, and what failures cost it. TensorFlow-free."""

import collections
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfbig.config import Config
from tfbig.planner.cluster import Cluster
from tfbig.planner.flops import tokens_per_step
from tfbig.variables import checkpoint_bytes, num_trained_parameters
from trainers.mesh import Mesh, placement_order
from trainers.state_bytes import own_state

_DAY = 86_400.0


@dataclass(frozen=True)
class Economics:
    """What a whole run takes.

    Args:
      tokens: trained on.
      steps: optimizer updates.
      ideal_days: without failures and checkpoints.
      days: with them.
      goodput: ideal_days / days.
      checkpoint_bytes: of one checkpoint, with optimizer state.
      checkpoint_seconds: to write it.
      checkpoint_every: steps between checkpoints that lose least.
      failures: expected in the run.
      dollars: of all nodes.
      megawatt_hours: with cooling.
      tonnes_co2e: of them.
    """

    tokens: float
    steps: float
    ideal_days: float
    days: float
    goodput: float
    checkpoint_bytes: float
    checkpoint_seconds: float
    checkpoint_every: int
    failures: float
    dollars: float
    megawatt_hours: float
    tonnes_co2e: float


def economics(
    config: Config,
    cluster: Cluster,
    step_seconds: float,
    tokens: float,
    constants: Mapping[str, Any],
) -> Economics:
    """Returns what training on `tokens` takes.

    Checkpoints are written every sqrt(2 x write time x time between failures), which loses least
    (Young, 1974; Daly, 2006); a failure loses half an interval and the restart.

    Args:
      config: of the run.
      cluster: that runs it.
      step_seconds: predicted.
      tokens: to train on.
      constants: carbon, reliability and storage of constants.json.
    """
    reliability, storage, carbon = (
        constants[name] for name in ("reliability", "storage", "carbon")
    )
    steps = tokens / tokens_per_step(config)
    ideal = steps * step_seconds
    size = checkpoint_bytes(config)
    of_one_node = size * fullest_share(config, cluster)
    write = of_one_node / storage["write_bytes_per_second_per_node"]
    read = of_one_node / storage["read_bytes_per_second_per_node"]
    rate = reliability["failures_per_device_day"] * cluster.num_devices / _DAY  # a second
    interval = math.sqrt(2 * write / rate) if rate else ideal
    interval = max(step_seconds, min(interval, ideal))
    per_failure = interval / 2 + reliability["restart_seconds"] + read
    # Time lost to failures is itself exposed to failures.
    lost = min(0.95, rate * per_failure)
    seconds = ideal * (1 + write / interval) / (1 - lost)
    hours = seconds / 3600
    watts = cluster.num_devices * cluster.device.watts * carbon["system_watts_per_device_watt"]
    megawatt_hours = watts * carbon["power_usage_effectiveness"] * hours / 1e6
    return Economics(
        tokens=tokens,
        steps=steps,
        ideal_days=ideal / _DAY,
        days=seconds / _DAY,
        goodput=ideal / seconds,
        checkpoint_bytes=size,
        checkpoint_seconds=write,
        checkpoint_every=max(1, round(interval / step_seconds)),
        failures=rate * seconds,
        dollars=cluster.num_nodes * cluster.dollars_per_node_hour * hours,
        megawatt_hours=megawatt_hours,
        tonnes_co2e=megawatt_hours * carbon["kg_co2e_per_kwh"],
    )


def fullest_share(config: Config, cluster: Cluster) -> float:
    """Returns the share of a checkpoint that the busiest node writes; stages are taken as equal.

    What ZeRO shards, every data rank writes its part of; of the rest, one replica's ranks all.
    """
    parallel = config.parallel
    stages, tensor = parallel.pipeline_parallel_degree, parallel.tensor_parallel_degree
    data = max(1, cluster.num_devices // (stages * tensor))
    sizes = {"data": data, "pipeline": stages, "tensor": tensor}
    mesh = Mesh(sizes, placement_order(parallel.placement_strategy))
    busiest = []
    for writers in (1, data):  # ranks of the data axis that write
        places = itertools.product(range(writers), range(stages), range(tensor))
        nodes = collections.Counter(
            mesh.rank_at(data=d, pipeline=p, tensor=t) // cluster.devices_per_node
            for d, p, t in places
        )
        busiest.append(max(nodes.values()) / nodes.total())
    sharded = _sharded_share(config)
    # The busiest node of both kinds, which are often one: rank 0's.
    return (1 - sharded) * busiest[0] + sharded * busiest[1]


def _sharded_share(config: Config) -> float:
    """Returns the share of a checkpoint that lies in the data ranks' shards."""
    level = config.parallel.sharding_level
    if not level:
        return 0.0
    slots = own_state(config, 0).optimizer  # as in a checkpoint: no master copy
    # Exact weights are with the slots where variables are narrower, and at level 3.
    weights = 4 if level == 3 or own_state(config, level).optimizer > slots else 0
    trained = num_trained_parameters(config.model, config.optimizer.freeze)
    return trained * (slots + weights) / checkpoint_bytes(config)
