"""Whether a run will fit, asked before it builds anything: memory by part beside what is there."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tfbig.config import Config, replace_fields
from tfbig.errors import UserError
from tfbig.planner.memory import RankMemory, peak, predict_memory
from tfbig.profiler.host_metrics import find_limits
from tfbig.validation import validate
from trainers import check_strategy

# A run is refused when the prediction exceeds what is there by more than it may be wrong.
TOLERANCE = 0.10
MEGABYTE = 1 << 20
# What to change, cheapest first by the time that it costs.
CHANGES = (
    {"shard_optimizer_state": True},
    {"activation_checkpointing": "attention"},
    {"activation_checkpointing": "block"},
    {"shard_gradients": True},
    {"shard_parameters": True},
    {"precision": "bfloat16"},
)


def free_host_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the memory that one process of this host may still take, within a container's limit.

    Args:
      cgroup: where the container's limits stand.
    """
    free = psutil.virtual_memory().available
    for name in ("memory.current", "memory/memory.usage_in_bytes"):
        file = cgroup / name
        if file.exists():
            free = min(free, find_limits(cgroup).memory_bytes - int(file.read_text()))
    return max(0, free) // int(os.environ.get("HOROVOD_LOCAL_SIZE", "1"))


def check_memory(config: Config, trainer: Any, device_bytes: int) -> list[str]:
    """Compares what every rank will hold at its peak with what is there; call on all ranks.

    Args:
      config: of the run.
      trainer: its engine has started, and it has made no variable.
      device_bytes: of this process's GPU; 0 means that tensors lie in host memory.

    Returns:
      A line for each pipeline rank, to print.

    Raises:
      UserError: on every rank, when it cannot fit, with the cheapest changes after which it does.
    """
    there = device_bytes or free_host_bytes()
    there = MEGABYTE * trainer.agree(there // MEGABYTE, "min")
    # Replicas of one process share the host's memory, but each has a GPU of its own.
    copies = 1 if device_bytes else max(1, trainer.num_replicas // trainer.data_size)
    ranks = predict_memory(config, trainer.num_replicas)
    if copies * peak(ranks).total > there * (1 + TOLERANCE):
        raise UserError(shortfall(config, trainer.num_replicas, there / copies))
    return [line(place, rank, there / copies) for place, rank in enumerate(ranks)]


def line(place: int, rank: RankMemory, there: float) -> str:
    """Returns a pipeline rank's expected peak by part, in words."""
    names = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "workspace")
    parts = ", ".join(f"{name} {getattr(rank, name) / 1e9:,.2f}" for name in names)
    return (
        f"memory of pipeline rank {place}: {rank.total / 1e9:,.2f} GB expected at its peak"
        f" ({parts}), {there / 1e9:,.1f} GB there"
    )


def shortfall(config: Config, data_size: int, there: float) -> str:
    """Returns why a run cannot fit and what would make it, in one line."""
    needed = peak(predict_memory(config, data_size)).total
    found = list(itertools.islice(changes_that_fit(config, data_size, there), 3))
    advice = "No change of flags makes it fit: take more ranks by --pipeline_parallel_degree and"
    advice += " --tensor_parallel_degree, or a smaller model."
    if found:
        advice = f"What would make it fit, cheapest first: {'; '.join(found)}."
    return (
        f"--strategy={config.parallel.strategy} would take {needed / 1e9:,.1f} GB on its fullest"
        f" rank, where {there / 1e9:,.1f} GB are there. {advice}"
    )


def changes_that_fit(config: Config, data_size: int, there: float) -> Iterator[str]:
    """Yields flags that make a run fit, cheapest first: single ones, then pairs, then triples.

    Args:
      config: that doesn't fit.
      data_size: replicas.
      there: bytes a rank.
    """
    rows = config.run.global_batch // (data_size * config.parallel.microbatches)
    factors = [factor for factor in (2, 4, 8, 16) if rows % factor == 0]
    microbatches = [{"microbatches": config.parallel.microbatches * factor} for factor in factors]
    single: list[dict[str, Any]] = [*CHANGES[:2], *microbatches, *CHANGES[2:]]
    single = [change for change in single if trains(replace_fields(config, change))]
    if data_size == 1:
        single = [change for change in single if not any(n.startswith("shard") for n in change)]
    everything = {name: value for change in single for name, value in change.items()}
    if not fits(config, everything, data_size, there):
        return
    yielded: list[set[str]] = []
    for count in (1, 2, 3):
        for combination in itertools.combinations(single, count):
            fields = {name: value for change in combination for name, value in change.items()}
            flags = {flag_of(name, value) for name, value in fields.items()}
            if len(fields) < count or any(known <= flags for known in yielded):
                continue  # says a flag twice, or more than is needed
            if fits(config, fields, data_size, there):
                yielded.append(flags)
                yield " ".join(flag_of(name, value) for name, value in fields.items())


def flag_of(name: str, value: object) -> str:
    """Returns a field as it is given on the command line.

    >>> flag_of("shard_optimizer_state", True), flag_of("microbatches", 2)
    ('--shard_optimizer_state', '--microbatches=2')
    """
    return f"--{name}" if value is True else f"--{name}={value}"


def fits(config: Config, fields: dict[str, Any], data_size: int, there: float) -> bool:
    """Returns whether the changed run is one that trains and fits; an unchanged one isn't."""
    changed = replace_fields(config, fields)
    if changed == config or not trains(changed):
        return False
    return peak(predict_memory(changed, data_size)).total <= there


def trains(config: Config) -> bool:
    """Returns whether the strategy takes the configuration."""
    try:
        validate(config)
        check_strategy(config)
    except UserError:
        return False
    return True
