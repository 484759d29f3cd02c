"""Whether a run will fit, asked before it builds anything: memory by part beside what is there."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import psutil

from tfbig.config import Config
from tfbig.errors import UserError
from tfbig.planner.changes import advice
from tfbig.planner.cluster import make_cluster
from tfbig.planner.layout import Request
from tfbig.planner.memory import (
    HOST_COPIES,
    MemoryOptions,
    Overhead,
    RankMemory,
    peak,
    predict_memory,
)
from tfbig.planner.prediction import Machines, request_for
from tfbig.planner.question import own_constants
from tfbig.planner.software import SOFTWARE
from tfbig.profiler.cgroup_limits import find_limits, memory_file

# A run is refused when the prediction exceeds what is there by more than it may be wrong.
TOLERANCE = 0.10
MEGABYTE = 1 << 20
# Where this machine isn't known, changes are ranked by what they would cost on this one.
STAND_IN = "l4"


def free_host_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the memory that one process of this host may still take, within a container's limit.

    Args:
      cgroup: where the container's limits stand.
    """
    free = psutil.virtual_memory().available
    if (used := memory_file(cgroup)) is not None:
        free = min(free, find_limits(cgroup).memory_bytes - int(used.read_text()))
    return max(0, free) // int(os.environ.get("HOROVOD_LOCAL_SIZE", "1"))


def check_memory(
    config: Config, trainer: Any, device_bytes: int, peak_source: str = ""
) -> list[str]:
    """Compares what every rank will hold at its peak with what is there; call on all ranks.

    Args:
      config: of the run.
      trainer: its engine has started, and it has made no variable.
      device_bytes: of this process's GPU; 0 means that tensors lie in host memory.
      peak_source: how tfbig/hardware.py names the device.

    Returns:
      A line for each pipeline rank, to print.

    Raises:
      UserError: on every rank, when it cannot fit, with the cheapest changes after which it does.
    """
    there = memory_there(trainer, device_bytes)
    overhead = overhead_of(device_bytes)
    if not fits(config, trainer, there, overhead):
        raise UserError(shortfall(config, trainer.num_replicas, there, overhead, peak_source))
    ranks = predict_memory(config, trainer.num_replicas, options_of(config, overhead), overhead)
    return [line(place, rank, there) for place, rank in enumerate(ranks)]


def memory_there(trainer: Any, device_bytes: int) -> float:
    """Returns the bytes that each replica of the rank with the least may take; call on all ranks.

    Args:
      trainer: its engine has started.
      device_bytes: of this process's GPU; 0 means that tensors lie in host memory.
    """
    there = device_bytes or free_host_bytes()
    there = MEGABYTE * trainer.agree(there // MEGABYTE, "min")
    # Replicas of one process share the host's memory, but each has a GPU of its own.
    return there / (1 if device_bytes else max(1, trainer.num_replicas // trainer.data_size))


def fits(config: Config, trainer: Any, there: float, overhead: Overhead) -> bool:
    """Returns whether every rank's prediction is in the memory that is there, or nearly.

    Args:
      config: of the run.
      trainer: its number of replicas is used.
      there: of `memory_there`.
      overhead: of `overhead_of`.
    """
    ranks = predict_memory(config, trainer.num_replicas, options_of(config, overhead), overhead)
    return peak(ranks).total <= there * (1 + TOLERANCE)


def overhead_of(device_bytes: int) -> Overhead:
    """Returns what communication takes; a process's own bytes are no longer there to take."""
    return Overhead(copies=0.0 if device_bytes else HOST_COPIES)


def options_of(config: Config, overhead: Overhead) -> MemoryOptions:
    """Returns what the run does to need less of the memory that its tensors lie in."""
    options = MemoryOptions.of(config)
    return options.on_host() if overhead.copies else options


def line(place: int, rank: RankMemory, there: float) -> str:
    """Returns a pipeline rank's expected peak by part, in words."""
    names = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "workspace")
    parts = ", ".join(f"{name} {getattr(rank, name) / 1e9:,.2f}" for name in names)
    return (
        f"memory of pipeline rank {place}: {rank.total / 1e9:,.2f} GB expected at its peak"
        f" ({parts}), {there / 1e9:,.1f} GB there"
    )


def shortfall(
    config: Config,
    data_size: int,
    there: float,
    overhead: Overhead | None = None,
    peak_source: str = "",
) -> str:
    """Returns why a run cannot fit and what would make it, in one line.

    Args:
      config: of the run.
      data_size: replicas.
      there: bytes a rank.
      overhead: of `overhead_of`.
      peak_source: how tfbig/hardware.py names the device.
    """
    overhead = overhead or Overhead()
    options = options_of(config, overhead)
    needed = peak(predict_memory(config, data_size, options, overhead)).total
    request, is_known = request_at_start(config, data_size, there, overhead, peak_source)
    return (
        f"--strategy={config.parallel.strategy} would take {needed / 1e9:,.1f} GB on its fullest"
        f" rank, where {there / 1e9:,.1f} GB are there. {advice(request, is_known)}"
    )


def request_at_start(
    config: Config, data_size: int, there: float, overhead: Overhead, peak_source: str
) -> tuple[Request, bool]:
    """Returns the planner's question about this run, and whether its machine is known.

    The memory is what is there now, so a process's own bytes don't count.
    """
    parallel = config.parallel
    num_devices = data_size * parallel.pipeline_parallel_degree * parallel.tensor_parallel_degree
    try:
        request, is_known = request_for(config, Machines(num_devices, peak_source)), True
    except UserError:
        constants = own_constants()
        cluster = make_cluster(f"{STAND_IN}:{num_devices}", constants)
        request = Request(config, cluster, SOFTWARE["tfbig"], 1.0, constants)
        is_known = False
    own = {
        "context_bytes": 0.0,
        "communicator_bytes": 0.0,
        "allocator_fraction": 0.0,
        "transport_copies": overhead.copies,
    }
    device = dataclasses.replace(request.cluster.device, memory_bytes=there)
    if overhead.copies:  # tensors lie in host memory: there is nowhere to move them
        device = dataclasses.replace(device, host_bandwidth=0.0)
    cluster = dataclasses.replace(
        request.cluster, device=device, overhead={**request.cluster.overhead, **own}
    )
    return dataclasses.replace(request, cluster=cluster), is_known
