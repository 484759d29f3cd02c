"""What a rank's parameters are and the bytes they take in our trainers. TensorFlow-free."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tfbig.config import Config, ModelConfig
from tfbig.variables import is_narrow, is_trained, part_of
from trainers.activations import COMPUTE_BYTES
from trainers.tensor_table import stage_paths


class Counts(NamedTuple):
    """Parameters of a rank, padding included.

    Args:
      total: all of them.
      trained: those that the optimizer changes.
      narrow: trained ones that passes read in the compute dtype; the others stay float32.
      frozen_narrow: the same of those that are not trained.
      largest: of one variable that is trained.
    """

    total: int
    trained: int
    narrow: int
    frozen_narrow: int
    largest: int

    def plus(self, other: "Counts", times: int = 1) -> "Counts":
        """Returns the counts of this and of `times` as much as the other."""
        total, trained, narrow, frozen = (
            a + times * b for a, b in zip(self[:4], other[:4], strict=True)
        )
        largest = max(self.largest, other.largest if times else 0)
        return Counts(total, trained, narrow, frozen, largest)


NOTHING = Counts(0, 0, 0, 0, 0)


@functools.lru_cache(maxsize=256)
def rank_counts(
    model: ModelConfig,
    freeze: Sequence[str],
    tensor: int,
    block_range: tuple[int, int],
    is_first: bool,
    is_last: bool,
) -> Counts:
    """Returns a stage's parameters on one rank of a tensor group.

    Args:
      model: the whole model.
      freeze: of OptimizerConfig.
      tensor: ranks of a tensor group.
      block_range: (first, last + 1) of its blocks.
      is_first: whether it has the embedding.
      is_last: whether it has the head.
    """
    counts = NOTHING
    for spec in stage_paths(model, block_range, is_first, is_last):
        shape, dim = list(spec.shape), spec.rule.shard_dim
        if dim is not None:
            shape[dim] = part_of(shape[dim], tensor, 0)[1]
        size = math.prod(shape)
        trained = size * is_trained(spec.path, model, freeze)
        narrow, frozen = (part * is_narrow(spec.path) for part in (trained, size - trained))
        counts = counts.plus(Counts(size, trained, narrow, frozen, trained))
    return counts


def stage_counts(
    config: Config, block_range: tuple[int, int], is_first: bool, is_last: bool
) -> Counts:
    """Returns a stage's parameters on one rank of a run; see `rank_counts`."""
    model, tensor = config.model, config.parallel.tensor_parallel_degree
    freeze = tuple(config.optimizer.freeze)
    if freeze:
        return rank_counts(model, freeze, tensor, block_range, is_first, is_last)
    # All blocks are alike.
    block = rank_counts(model, (), tensor, (0, 1), False, False)
    ends = rank_counts(model, (), tensor, (0, 0), is_first, is_last)
    return ends.plus(block, block_range[1] - block_range[0])


# Strategies whose passes add each microbatch's gradients to totals, even those of a single one.
HAVE_TOTALS = ("pipeline",)


@dataclass(frozen=True)
class StateBytes:
    """Bytes that a parameter takes.

    Args:
      weight: what passes read, and the variable where that is another; sharded at ZeRO level 3.
      gradient: of a trained one, summed over a step's microbatches; sharded from level 2 on.
      narrow_gradient: of what passes read in the compute dtype; None where it is `gradient`.
      optimizer: of a trained one, slots, averages and a master copy; sharded from level 1 on.
      passing: a microbatch's gradient before it is added; never sharded, but of one unit only where
        gradients are.
      wide_weight: `weight` of tables and norms, which stay float32; None where it is the same.
      frozen_weight: `weight` of what is not trained; None where it is the same.
      gathered: of a weight on its way to the other ranks.
      summed: of a gradient on its way.
    """

    weight: float
    gradient: float
    optimizer: float
    passing: float = 0.0
    wide_weight: float | None = None
    frozen_weight: float | None = None
    gathered: float = 4.0
    summed: float = 4.0
    narrow_gradient: float | None = None

    def weights(self, counts: Counts) -> float:
        """Returns the bytes of a rank's weights, unsharded."""
        wide = self.weight if self.wide_weight is None else self.wide_weight
        frozen = self.weight if self.frozen_weight is None else self.frozen_weight
        num_wide = counts.total - counts.narrow - counts.frozen_narrow
        return self.weight * counts.narrow + frozen * counts.frozen_narrow + wide * num_wide

    def gradients(self, counts: Counts, data_size: int) -> float:
        """Returns the bytes of a rank's gradients at the end of backward, not shared by level yet.

        Args:
          counts: of the rank.
          data_size: ranks that share what has been summed, where the rest is still narrow.
        """
        narrow = self.gradient
        if self.narrow_gradient is not None:
            narrow = max(self.narrow_gradient, self.gradient / data_size)
        return narrow * counts.narrow + self.gradient * (counts.trained - counts.narrow)

    def resting(self, counts: Counts, level: int, data_size: int) -> float:
        """Returns what a rank holds from step to step, and the summed gradients.

        Args:
          counts: of the rank.
          level: of ZeRO.
          data_size: ranks that share state.
        """
        shares = [data_size if level >= stage else 1 for stage in (1, 2, 3)]
        gradients = self.gradients(counts, data_size) / shares[1]
        optimizer = self.optimizer * counts.trained / shares[0]
        return self.weights(counts) / shares[2] + gradients + optimizer


def own_state(config: Config, level: int | None = None) -> StateBytes:
    """Returns the bytes a parameter takes in our trainers; docs/memory.md has them as a table.

    Unsharded, variables are float32, and passes read a copy of kernels and biases in the compute
    dtype; without totals it goes as its gradient comes. From level 1 on the variables are what
    passes read, and exact values are with the optimizer, shared; at level 3 these are the weights,
    and what passes read is gathered. At level 1 without totals a gradient stays as it was made
    until its bucket is summed. What is not trained stays float32; from level 2 on its copies are
    made unit by unit.

    Args:
      config: of the run.
      level: of ZeRO; None means the run's.
    """
    parallel, optimizer = config.parallel, config.optimizer
    level = parallel.sharding_level if level is None else level
    element = COMPUTE_BYTES[parallel.precision]
    narrow = element < 4
    slots = 8.0 if optimizer.optimizer == "adamw" else 0.0
    slots += 4 if optimizer.ema_decay > 0 else 0
    own_totals = parallel.strategy in HAVE_TOTALS
    # Of what is kept in float32 gradients are float32, too; passes of their own take narrow copies.
    made = 4 if level == 0 and not own_totals else element
    totals = own_totals or parallel.microbatches > 1
    passing = made if totals or level > 1 else 0
    if level == 0:
        copied = 4 + element if narrow else 4
        weight = copied if totals else 4
        return StateBytes(weight, 4, slots, passing, wide_weight=4, frozen_weight=copied)
    if level < 3:
        exact = 4 if narrow else 0
        frozen = 4 + exact * element / 4 if level == 1 else 4
        until_summed = None if totals or level > 1 else element
        return StateBytes(
            element, 4, slots + exact, passing, 4, frozen, narrow_gradient=until_summed
        )
    return StateBytes(4, 4, slots, passing)
