"""Memory and step time of a layout in microseconds, to rank thousands. TensorFlow-free.

Stages are taken as equal, and the schedule by its formula; `make_plan` follows with the partition
and the operations that train would run.
"""

import functools
import math

from tfbig.config import Config
from tfbig.planner.cluster import Cluster
from tfbig.planner.kernels import Cost
from tfbig.planner.memory import Accounting, MemoryOptions, Overhead
from tfbig.planner.network import Line
from tfbig.planner.software import Software
from trainers.activations import COMPUTE_BYTES, group_size
from trainers.partition import Stage
from trainers.state_bytes import rank_counts, stage_counts
from trainers.validate import num_chunks

Lines = tuple[Line, Line, Line]  # of the data axis, the tensor axis, and a pair of pipeline ranks
Costs = tuple[Cost, Cost, Cost]  # of a block, the embedding, the head


def rough_memory(
    config: Config, data_size: int, options: MemoryOptions, overhead: Overhead
) -> float:
    """Returns the peak bytes of the first or the last pipeline rank, whichever needs more."""
    parallel, model = config.parallel, config.model
    ranks, chunks = parallel.pipeline_parallel_degree, num_chunks(config)
    rows = max(1, config.run.global_batch // (data_size * parallel.microbatches))
    accounting = Accounting(config, data_size, rows, options, overhead)
    blocks = math.ceil(model.num_layers / ranks)
    count = functools.partial(
        rank_counts, model, tuple(config.optimizer.freeze), parallel.tensor_parallel_degree
    )
    most = 0.0
    for place in {0, ranks - 1}:
        in_flight: float = min(parallel.microbatches, ranks - place)
        if chunks > 1:  # arXiv 2205.05198, section 4.2.3
            warm = 2 * (ranks - 1 - place) + (chunks - 1) * ranks + 1
            in_flight = min(parallel.microbatches, warm / chunks)
        is_first, is_last = place == 0, place == ranks - 1
        first = 0 if is_first else model.num_layers - blocks
        counts = count((0, 0), is_first, is_last)
        if config.optimizer.freeze:
            counts = count((first, first + blocks), is_first, is_last)
        else:
            counts = counts.plus(count((0, 1), False, False), blocks)
        held = math.ceil(blocks * in_flight)  # as one microbatch of so many blocks
        stage = Stage((0, held), place, counts.total, 0.0, 0.0, 0.0, 1)
        index = ranks * chunks - 1 if is_last else 0
        most = max(most, accounting.parts(counts, [(index, stage)]).total)
    return most


def rough_seconds(
    config: Config,
    cluster: Cluster,
    options: MemoryOptions,
    software: Software,
    lines: Lines,
    costs: Costs,
) -> float:
    """Returns a step's seconds, stages taken as equal.

    Args:
      config: of the run.
      cluster: that runs it.
      options: of memory.
      software: that runs it.
      lines: of the mesh.
      costs: of one microbatch.
    """
    data, tensor, pair = lines
    block, embedding, head = costs
    parallel, model = config.parallel, config.model
    ranks, chunks, m = parallel.pipeline_parallel_degree, num_chunks(config), parallel.microbatches
    rows = max(1, config.run.global_batch // (data.size * m))
    element = COMPUTE_BYTES[parallel.precision]
    elements = rows * config.data.sequence_length * model.embed_dim
    summed = 4 if software.name == "tfbig" else element
    if parallel.sequence_parallel:
        one = tensor.all_gather(elements * element) + tensor.all_gather(elements * summed)
    else:
        one = tensor.all_reduce(elements * summed)
    again = bool(group_size(options.activation_checkpointing))
    each = block.forward + block.backward + block.again + (6 if again else 4) * one
    ends = embedding.forward + embedding.backward + head.forward + head.backward
    # The partition evens out embedding and head, but blocks are whole.
    largest = math.ceil(model.num_layers / (ranks * chunks))
    stage = max((model.num_layers * each + ends) / ranks, chunks * largest * each)
    sent = 0.0
    if ranks > 1 and not software.overlaps_pipeline:
        size = float(elements * element)
        if parallel.sequence_parallel or software.scatters_hidden:
            size /= tensor.size
        sent = 2 * chunks * (pair.latency + size / pair.bandwidth)
    # A last group of fewer than p microbatches leaves gaps, before each chunk but the first.
    gaps = (math.ceil(m / ranks) * ranks - m) * (chunks - 1) / chunks
    # arXiv 2104.04473, section 2.2: (p - 1) / v microbatches' time is waited.
    passes = (m + gaps + (ranks - 1) / chunks) * (stage + sent)
    parameters = _trained(config) / ranks
    return passes + _state_seconds(parameters, passes, config, cluster, options, software, data)


def _trained(config: Config) -> int:
    """Returns the trained parameters of a tensor rank in all stages, a tied table in both ends."""
    last = config.model.num_layers
    if config.parallel.pipeline_parallel_degree == 1:
        return stage_counts(config, (0, last), True, True).trained
    halves = ((0, last // 2), True, False), ((last // 2, last), False, True)
    return sum(stage_counts(config, *half).trained for half in halves)


def _state_seconds(
    parameters: float,
    passes: float,
    config: Config,
    cluster: Cluster,
    options: MemoryOptions,
    software: Software,
    data: Line,
) -> float:
    """Returns the seconds of gradients' and weights' collectives, and of the update."""
    level = options.sharding_level
    state = options.state or software.state(config, level)
    share = data.size if level else 1
    device = cluster.device
    moved = parameters / share * (2 * state.optimizer + 18.0)
    moved += parameters * (state.weight + state.gradient)
    update = moved / device.memory_bandwidth / device.bandwidth
    if data.size == 1:
        return update
    if level == 0:
        return update + data.all_reduce(parameters * state.summed)
    gather, scatter = (
        data.all_gather(parameters * state.gathered),
        data.all_gather(parameters * state.summed),
    )
    if level < 3:
        return update + gather + scatter
    comm = config.parallel.microbatches * (2 * gather + scatter)
    return update + (max(0.0, comm - passes) if software.overlaps_data else comm)
