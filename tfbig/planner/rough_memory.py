"""Memory of a layout in microseconds, to rank thousands: stages are taken as equal. TF-free."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from tfbig.config import Config
from tfbig.parallel_config import ParallelConfig
from tfbig.planner.closed_form import Key
from tfbig.planner.layout import Request
from tfbig.planner.memory import Accounting
from trainers.state_bytes import Counts, stage_counts
from trainers.validate import num_chunks


class Need(NamedTuple):
    """Bytes of a rank on its device and in its host's memory."""

    device: float
    host: float


def together(states: Sequence[Need], passes: Sequence[Need]) -> Need:
    """Returns the most that a rank needs of either memory."""
    pairs = list(zip(states, passes, strict=True))
    return Need(max(a.device + b.device for a, b in pairs), max(a.host + b.host for a, b in pairs))


class RoughMemory:
    """Closed formulas over layouts of one model, batch and cluster; remembers what recurs."""

    def __init__(self) -> None:
        self._accounts: dict[Key, Accounting] = {}
        self._states: dict[Key, list[Need]] = {}

    def need(self, request: Request) -> Need:
        """Returns the most that the first or last pipeline rank needs."""
        return together(self.state(request), self.passes(request))

    def passes(self, request: Request) -> list[Need]:
        """Returns what passes hold on the first and on the last rank; on one that is both."""
        config, account = request.config, self._account(request)
        ranks, chunks = config.parallel.pipeline_parallel_degree, num_chunks(config)
        blocks, slack = math.ceil(config.model.num_layers / ranks), account.overhead.allocator
        found = []
        for place in sorted({0, ranks - 1}):
            flying = in_flight(config.parallel, place, chunks)
            held, entered = math.ceil(blocks * flying), 0.0 if place else math.ceil(flying)
            parts, host = account.pass_parts(held, entered, place == ranks - 1)
            found.append(Need(sum(parts.values()) * (1 + slack), host))
        return found

    def _account(self, request: Request) -> Accounting:
        options, rows = request.options, request.microbatch_size
        key = (*_layout(request.config.parallel), request.data_size, rows, options)
        if key not in self._accounts:
            overhead = request.software.overhead(request.cluster)
            self._accounts[key] = Accounting(
                request.config, request.data_size, rows, options, overhead
            )
        return self._accounts[key]

    def state(self, request: Request) -> list[Need]:
        """Returns what these ranks hold whatever is in flight."""
        config, options = request.config, request.options
        unit = options.activation_checkpointing if options.sharding_level > 1 else ""
        key = (
            *_layout(config.parallel),
            request.data_size,
            config.parallel.microbatches > 1,
            options.sharding_level,
            options.offload_optimizer_state,
            unit,
        )
        if key not in self._states:
            account, found = self._account(request), []
            slack, context = account.overhead.allocator, account.context
            for counts in end_counts(config):
                parts, host = account.state_parts(counts, True)
                found.append(Need(sum(parts.values()) * (1 + slack) + context, host))
            self._states[key] = found
        return self._states[key]


def _layout(parallel: ParallelConfig) -> Key:
    return (
        parallel.strategy,
        parallel.pipeline_parallel_degree,
        parallel.tensor_parallel_degree,
        parallel.sequence_parallel,
        parallel.precision,
        parallel.attention,
    )


def in_flight(parallel: ParallelConfig, place: int, chunks: int) -> float:
    """Returns the microbatches whose activations a pipeline rank holds at most."""
    ranks, count = parallel.pipeline_parallel_degree, parallel.microbatches
    limit = parallel.active_microbatches or count
    if ranks > 1 and parallel.pipeline == "simple":
        return min(count, limit)
    if chunks == 1:
        return min(count, ranks - place, limit)
    # arXiv 2205.05198, section 4.2.3
    warm = 2 * (ranks - 1 - place) + (chunks - 1) * ranks + 1
    return min(count, warm / chunks, limit)


def end_counts(config: Config) -> list[Counts]:
    """Returns the parameters of the first and of the last pipeline rank; of one that is both."""
    layers, ranks = config.model.num_layers, config.parallel.pipeline_parallel_degree
    blocks = math.ceil(layers / ranks)
    if ranks == 1:
        return [stage_counts(config, (0, layers), True, True)]
    return [
        stage_counts(config, (0, blocks), True, False),
        stage_counts(config, (layers - blocks, layers), False, True),
    ]
