"""Which blocks each pipeline stage holds, balanced by a cost model. TensorFlow-free."""

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tfbig.config import Config
from tfbig.errors import UserError
from trainers.activations import block_bytes, head_bytes
from trainers.pipeline_schedule import stages_in_flight
from trainers.state_bytes import NOTHING, Counts, own_state, rank_counts, stage_counts
from trainers.validate import num_chunks


@dataclass(frozen=True)
class Stage:
    """One of the parts that the model is cut into, and what it costs a rank of a tensor group."""

    block_range: tuple[int, int]
    rank: int  # place on the pipeline axis
    num_parameters: int
    flops: float  # forward and backward of one microbatch
    state_bytes: float
    activation_bytes: float  # of one microbatch
    in_flight: int  # microbatches whose activations are held at once


@dataclass(frozen=True)
class Partition:
    """All stages, in order of the forward pass."""

    stages: tuple[Stage, ...]

    def table(self) -> str:
        """Returns the stages as a table to print."""
        flops = max(stage.flops for stage in self.stages)
        lines = ["stage rank  blocks  parameters  work  state MB  activation MB x in flight"]
        for index, stage in enumerate(self.stages):
            blocks = f"{stage.block_range[0]}-{stage.block_range[1] - 1}"
            lines.append(
                f"{index:5d} {stage.rank:4d} {blocks:>7s} {stage.num_parameters:11,d}"
                f" {stage.flops / flops:5.2f} {stage.state_bytes / 1e6:9,.1f}"
                f" {stage.activation_bytes / 1e6:14,.2f} x {stage.in_flight}"
            )
        return "\n".join(lines)

    def to_dict(self) -> list[dict[str, Any]]:
        """Returns the stages ready for JSON."""
        return [asdict(stage) for stage in self.stages]


class CostModel:
    """What a stage costs one rank, from the model's shapes.

    Args:
      config: of the run.
      microbatch_size: sequences of one forward.
      recompute: what is made again in the backward pass (trainers/activations.py).
      data_size: replicas, which may share state.
    """

    def __init__(
        self, config: Config, microbatch_size: int, recompute: str = "none", data_size: int = 1
    ) -> None:
        self._config, self._rows, self._recompute = config, microbatch_size, recompute
        self._data_size = data_size
        self._parallel, self._model = config.parallel, config.model
        self._tensor = config.parallel.tensor_parallel_degree
        self._num_ranks = config.parallel.pipeline_parallel_degree
        self.num_stages = self._num_ranks * num_chunks(config)
        self._state = own_state(config)
        # What --freeze leaves out is not balanced.
        count = functools.partial(rank_counts, self._model, (), self._tensor)
        self._block_counts = count((0, 1), False, False)
        self._end_counts = {
            index: count((0, 0), index == 0, index == self.num_stages - 1)
            for index in (0, self.num_stages - 1)
        }
        self._in_flight = self._microbatches_in_flight()

    def stage(self, index: int, first: int, stop: int) -> Stage:
        """Returns the costs of stage number `index` if it holds the blocks [first, stop)."""
        is_last = index == self.num_stages - 1
        blocks = stop - first
        counts = self._end_counts.get(index, NOTHING).plus(self._block_counts, blocks)
        level = self._parallel.sharding_level
        state_bytes = self._state.resting(counts, level, self._data_size)
        activations, flops = blocks * self._block_activations(), blocks * self._block_flops()
        if is_last:
            activations += self._head_activations()
            flops += self._head_flops()
        return Stage(
            block_range=(first, stop),
            rank=index % self._num_ranks,
            num_parameters=counts.total,
            flops=flops,
            state_bytes=state_bytes + self._state.passing * counts.trained,
            activation_bytes=activations,
            in_flight=self._in_flight[index],
        )

    def _tokens(self) -> int:
        return self._rows * self._config.data.sequence_length

    def _block_flops(self) -> float:
        model, length = self._model, self._config.data.sequence_length
        attention = model.num_heads * model.attention_head_dim
        weights = 4 * model.embed_dim * attention + 2 * model.embed_dim * model.hidden_dim
        return 6.0 * self._tokens() * (weights + 2 * length * attention) / self._tensor

    def _head_flops(self) -> float:
        return 6.0 * self._tokens() * self._model.embed_dim * self._model.vocab_size / self._tensor

    def _block_activations(self) -> float:
        return block_bytes(self._config, self._rows, self._recompute)

    def _head_activations(self) -> float:
        return head_bytes(self._config, self._rows)

    def _microbatches_in_flight(self) -> tuple[int, ...]:
        """Returns, by stage, the microbatches whose activations are held at once."""
        parallel = self._parallel
        return stages_in_flight(
            parallel.pipeline if self._num_ranks > 1 else "1f1b",
            self._num_ranks,
            parallel.microbatches,
            self.num_stages // self._num_ranks,
            parallel.active_microbatches,
        )


def choose_partition(
    config: Config, microbatch_size: int, recompute: str = "none", data_size: int = 1
) -> Partition:
    """Returns the stages of a run: by hand where --partition says so, else by the cost model.

    Args:
      config: of the run.
      microbatch_size: sequences of one forward.
      recompute: what is made again in the backward pass.
      data_size: replicas, which may share state.

    Raises:
      UserError: --partition doesn't describe a partition.
    """
    costs = CostModel(config, microbatch_size, recompute, data_size)
    if config.parallel.partition:
        bounds = _bounds_by_hand(config, costs.num_stages)
    else:
        bounds = _balanced_bounds(costs, config.model.num_layers, config.parallel.memory_weight)
    return Partition(
        tuple(
            costs.stage(index, bounds[index], bounds[index + 1])
            for index in range(costs.num_stages)
        )
    )


def counts_of(config: Config, partition: Partition, rank: int) -> Counts:
    """Returns the parameters of a pipeline rank's stages."""
    counts, last = NOTHING, len(partition.stages) - 1
    for index, stage in enumerate(partition.stages):
        if stage.rank == rank:
            own = stage_counts(config, stage.block_range, index == 0, index == last)
            counts = counts.plus(own)
    return counts


def _bounds_by_hand(config: Config, num_stages: int) -> list[int]:
    text, layers = config.parallel.partition, config.model.num_layers
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(
            f"--partition={text} is no list of blocks a stage, such as 5,4,3."
        ) from None
    if len(counts) != num_stages or sum(counts) != layers or min(counts) < 1:
        raise UserError(
            f"--partition={text} names {len(counts)} stages with {sum(counts)} blocks in all; it"
            f" must name {num_stages}, each of at least 1 block, with {layers} in all."
        )
    return [sum(counts[:index]) for index in range(num_stages + 1)]


def _balanced_bounds(costs: CostModel, num_layers: int, memory_weight: float) -> list[int]:
    """Returns the bounds whose costliest stage costs least, by dynamic programming.

    A stage's cost is memory_weight x its share of all memory + (1 - memory_weight) x its share of
    all computation. Among equal maxima the smallest sum of squares wins, so that stages are even.
    """
    num_stages = costs.num_stages
    whole = [costs.stage(index, 0, num_layers) for index in range(num_stages)]
    all_flops = max(stage.flops for stage in whole)
    all_memory = max(_memory(stage) for stage in whole)

    @functools.cache
    def cost(index: int, blocks: int) -> float:
        stage = costs.stage(index, 0, blocks)  # all blocks cost the same
        return (
            memory_weight * _memory(stage) / all_memory
            + (1 - memory_weight) * stage.flops / all_flops
        )

    even = [num_layers * index // num_stages for index in range(num_stages + 1)]
    # No stage of the best partition costs more than the costliest of an even one.
    limit = max(cost(index, even[index + 1] - even[index]) for index in range(num_stages))

    Best = tuple[float, float, tuple[int, ...]]
    best: dict[int, Best] = {0: (0.0, 0.0, (0,))}
    for index in range(num_stages):
        following: dict[int, Best] = {}
        for first, (largest, squares, bounds) in best.items():
            remaining = num_stages - 1 - index
            stops: Sequence[int] = range(first + 1, num_layers - remaining + 1)
            for stop in stops if remaining else [num_layers]:
                value = cost(index, stop - first)
                if value > limit:
                    break
                candidate = (max(largest, value), squares + value**2, (*bounds, stop))
                if stop not in following or candidate < following[stop]:
                    following[stop] = candidate
        best = following
    return list(best[num_layers][2])


def _memory(stage: Stage) -> float:
    return stage.state_bytes + stage.activation_bytes * stage.in_flight
