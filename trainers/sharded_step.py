"""A step unit by unit: gradients leave, and weights come, when they are needed (ZeRO-2 and -3).

One graph for all microbatches. TensorFlow runs what is ready, so control dependencies say how far
communication may run ahead: one unit's weights before their use, one unit's gradients behind.
Source: Rajbhandari et al., ZeRO (arXiv 1910.02054, section 5).
"""

from collections.abc import Sequence

import tensorflow as tf

from tfbig.model.host_store import HostStore
from tfbig.parallel_config import ParallelConfig
from tfbig.recomputation_mode import group_size
from trainers.base import Batch
from trainers.clock import Clock
from trainers.gradients import BatchSums, microbatch
from trainers.sharded_optimizer import Parts
from trainers.unit_passes import UnitPasses
from trainers.unit_state import UnitState


class ShardedStep:
    """The forward and backward passes of a step, each rank keeping its part of the gradients.

    Args:
      passes: of each unit, in order of the forward pass.
      state: gives a unit's weights and sums its gradients over the ranks.
      recomputes: whether of blocks only the input is kept.
      offload_horizon: has these wait in host memory, see HostStore; None doesn't.
    """

    def __init__(
        self,
        passes: Sequence[UnitPasses],
        state: UnitState,
        recomputes: bool,
        offload_horizon: int | None = None,
    ) -> None:
        self._passes, self._state = list(passes), state
        self._recomputes, self._offload_horizon = recomputes, offload_horizon
        # Nothing before it is trained, so backward ends there.
        self._first = next(i for i, one in enumerate(self._passes) if one.unit.trained)

    def gradients(
        self,
        batch: Batch,
        step: tf.Tensor,
        num_microbatches: int,
        loss_scale: tf.Tensor | None,
        clock: Clock | None,
    ) -> tuple[Parts, list[BatchSums]]:
        """Returns this rank's parts of each bucket, and this process's sums of each microbatch.

        Args:
          batch: this process's slice of a global batch.
          step: scalar int64.
          num_microbatches: forwards, one after the other.
          loss_scale: what the gradients are multiplied by; None means 1.
          clock: notes when collectives were in flight.
        """
        upstream = tf.constant(1.0) if loss_scale is None else loss_scale
        totals: dict[int, tf.Tensor] = {}
        all_sums: list[BatchSums] = []
        for index in range(num_microbatches):
            part = microbatch(batch, index, num_microbatches)
            begin = list(totals.values())  # the microbatch before is done
            one = _Microbatch(self, part, step, str(index), clock)
            all_sums.append(one.forward(begin))
            parts = one.backward(upstream)
            totals = {key: totals[key] + x if totals else x for key, x in parts.items()}
        return [totals[index] for index in sorted(totals)], all_sums


class _Microbatch:
    """One microbatch on its way through the units and back, while a graph is made."""

    def __init__(
        self, owner: ShardedStep, batch: Batch, step: tf.Tensor, name: str, clock: Clock | None
    ) -> None:
        self._owner, self._batch, self._step = owner, batch, step
        self._name, self._clock = name, clock
        self._entered: list[tf.Tensor | None] = []
        self._kept: list[Sequence[tf.Tensor] | None] = []
        self._last_weights: list[tf.Tensor] = []
        horizon = owner._offload_horizon
        self._store = None if horizon is None else HostStore(horizon)

    def forward(self, begin: Sequence[tf.Tensor]) -> BatchSums:
        """Returns the head's sums.

        Args:
          begin: what must be there before the first weights come.
        """
        hidden: tf.Tensor | None = None
        for index, unit in enumerate(self._owner._passes):
            self._entered.append(hidden)
            before = self._entered[index - 1] if index else None
            after = begin if before is None else [before]
            weights = self._owner._state.weights(index, after, f"forward_{self._name}", self._clock)
            if index < self._owner._first:
                self._kept.append(None)
                hidden = unit.forward(weights, hidden, self._step, self._batch)
                continue
            arguments = unit.arguments(weights, hidden, self._step, self._batch)
            results, kept = unit.training(self._batch).forward(arguments)
            makes_again = self._makes_again(index)
            if makes_again and self._store is not None:
                self._store.put(index, hidden)
            self._kept.append(None if makes_again else kept)
            hidden, self._last_weights = results[0], weights
        return BatchSums(*results)

    def backward(self, upstream: tf.Tensor) -> dict[int, tf.Tensor]:
        """Returns this rank's parts of the summed gradients, by bucket."""
        totals: dict[int, tf.Tensor] = {}
        left: list[list[tf.Tensor]] = [[], []]  # what each unit sent off, two units behind
        arrived = self._entered[-1]
        for index in reversed(range(self._owner._first, len(self._owner._passes))):
            unit = self._owner._passes[index]
            weights = self._last_weights
            if index < len(self._owner._passes) - 1:
                name = f"backward_{self._name}"
                weights = self._owner._state.weights(index, [arrived], name, self._clock)
            with tf.control_dependencies(left[-2]):
                upstream = tf.identity(upstream)
            # The head's upstream gradient is there from the start, what enters the head isn't.
            arrived = upstream if index < len(self._owner._passes) - 1 else self._entered[-1]
            gradients, upstream = self._unit_backward(index, weights, upstream)
            parts = self._owner._state.reduce(
                index,
                dict(zip(unit.unit.trained, gradients, strict=True)),
                f"scatter_{self._name}",
                self._clock,
            )
            left.append(list(parts.values()))
            for bucket, part in parts.items():
                totals[bucket] = totals[bucket] + part if bucket in totals else part
        return totals

    def _unit_backward(
        self, index: int, weights: Sequence[tf.Tensor], upstream: tf.Tensor
    ) -> tuple[Sequence[tf.Tensor], tf.Tensor | None]:
        """Returns gradients of the trained weights and of what entered the unit."""
        unit, kept, hidden = self._owner._passes[index], self._kept[index], self._entered[index]
        passes = unit.training(self._batch)
        if kept is None:
            if self._store is not None:
                hidden = self._store.get(index, upstream)
            with tf.control_dependencies([upstream]):  # or it would be merged with the first one
                hidden = tf.identity(hidden)
        arguments = unit.arguments(weights, hidden, self._step, self._batch)
        if kept is None:
            _, kept = passes.forward(arguments)
        gradients = passes.backward(arguments, kept, upstream)
        count = len(unit.unit.trained)
        return gradients[:count], gradients[count] if len(gradients) > count else None

    def _makes_again(self, index: int) -> bool:
        first, stop = self._owner._passes[index].unit.blocks
        return self._owner._recomputes and stop > first


def make_step(
    parallel: ParallelConfig, passes: Sequence[UnitPasses], state: UnitState
) -> ShardedStep:
    """Returns the step that a run's configuration asks for."""
    recomputes = group_size(parallel.activation_checkpointing) > 0
    return ShardedStep(passes, state, recomputes, parallel.offload_horizon)
