"""Where the units' weights come from and where their gradients go."""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfbig.model.context import Context
from tfbig.model.gpt import GPT
from trainers.base import Batch
from trainers.buckets import flatten, unflatten
from trainers.clock import Clock
from trainers.collectives import Group
from trainers.flat_buckets import FlatBucket
from trainers.frozen_weights import FrozenWeights
from trainers.gradients import BatchSums
from trainers.model_units import Unit
from trainers.sharded_optimizer import ShardedOptimizer
from trainers.tensor_table import Shard
from trainers.unit_passes import UnitPasses


class UnitState:
    """The weights of a rank's units: its own variables, or parts that are gathered.

    Args:
      model: a whole model.
      units: of it.
      optimizer: has a bucket for each set of trained variables that units use together.
      variables: the weights by path; None where the optimizer and `frozen` have parts of them.
      shards: what they are of the model's variables.
      frozen: has such buckets of the others, where weights are shared.
      replicas: the tensor group, where some of its ranks' copies of a variable have a share each
        of its gradient; None where there is none.
      sequence_parallel: whether these ranks saw different positions.
    """

    def __init__(
        self,
        model: GPT,
        units: Sequence[Unit],
        optimizer: ShardedOptimizer,
        variables: Mapping[str, tf.Variable] | None,
        shards: Mapping[str, Shard],
        frozen: FrozenWeights | None = None,
        replicas: Group | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        self._model, self._units, self._optimizer = model, list(units), optimizer
        self._variables, self._shards, self._frozen = variables, shards, frozen
        self._replicas, self._sequence_parallel = replicas, sequence_parallel

    def weights(
        self,
        unit: int,
        after: Sequence[tf.Tensor],
        name: str,
        clock: Clock | None = None,
        prefix: str = "",
    ) -> list[tf.Tensor]:
        """Returns a unit's weights as the layers compute with them, those that are trained first.

        Args:
          unit: its number.
          after: what must be there before they come.
          name: of the collectives.
          clock: notes the time in flight.
          prefix: "ema/" gives the averages instead; of a frozen weight that is the weight.
        """
        one, values = self._units[unit], {}
        if self._variables is not None:
            paths = one.frozen if prefix else one.paths
            with tf.control_dependencies(list(after)):
                values = {path: tf.identity(self._variables[path].read_value()) for path in paths}
        if self._variables is None or prefix:
            for index in buckets_of(one, self._optimizer.buckets):
                full_name = f"{name}_{unit}_{index}"
                values |= self._optimizer.gather_bucket(index, full_name, after, clock, prefix)
        if self._frozen is not None:
            for index in buckets_of(one, self._frozen.buckets):
                full_name = f"{name}_{unit}_frozen_{index}"
                values |= self._frozen.gather_bucket(index, full_name, after, clock)
        ordered = {path: values[path] for path in one.paths}
        return list(self._model.compute_weights(ordered).values())

    def reduce(
        self, unit: int, gradients: Mapping[str, tf.Tensor], name: str, clock: Clock | None
    ) -> dict[int, tf.Tensor]:
        """Returns this rank's parts, by bucket, of a unit's gradients summed over all ranks."""
        gradients = dict(gradients)
        if self._replicas is not None:
            shards = (self._shards[path] for path in gradients)
            paths = [s.path for s in shards if s.shares_gradient(self._sequence_parallel)]
            if paths:
                flat = flatten({p: tf.cast(gradients[p], tf.float32) for p in paths}, paths)
                flat = self._replicas.all_reduce(flat, f"replicated_{name}_{unit}", clock=clock)
                gradients |= unflatten(flat, {p: gradients[p].shape for p in paths}, paths)
        return {
            index: self._optimizer.reduce_bucket(index, gradients, f"{name}_{unit}_{index}", clock)
            for index in buckets_of(self._units[unit], self._optimizer.buckets)
        }

    def evaluate(self, passes: Sequence[UnitPasses], batch: Batch, prefix: str) -> BatchSums:
        """Returns the sums of a forward pass without dropout, of which nothing is kept.

        Args:
          passes: of each unit.
          batch: of this process.
          prefix: "ema/" takes the averages.
        """
        step = tf.constant(0, tf.int64)  # of no dropout
        entering: list[tf.Tensor] = []  # what the next weights wait for
        hidden = None
        for index, unit in enumerate(passes):
            own = self.weights(index, entering, f"evaluation_{prefix}", prefix=prefix)
            entering = [] if hidden is None else [hidden]
            hidden = unit.run(own, hidden, step, batch, training=False)
        assert isinstance(hidden, BatchSums)
        return hidden

    def last_logits(
        self, passes: Sequence[UnitPasses], tokens: tf.Tensor, last: tf.Tensor, context: Context
    ) -> tf.Tensor:
        """Returns logits (B, V of this rank) at one position (B,) of each row of tokens (B, L)."""
        entering: list[tf.Tensor] = []
        hidden = None
        for index, unit in enumerate(passes):
            with unit.scope(self.weights(index, entering, "decoding")):
                entering = [] if hidden is None else [hidden]
                hidden = unit.hidden(hidden, tokens, context)
                if unit.unit.has_head:
                    hidden = tf.gather(hidden, last, batch_dims=1)[:, tf.newaxis]  # (B, 1, D)
                    hidden = self._model.logits(hidden)[:, 0]  # (B, V of this rank)
        return hidden


def buckets_of(unit: Unit, buckets: Sequence[FlatBucket]) -> list[int]:
    """Returns the buckets that a unit's variables lie in; it uses each of them whole."""
    return [index for index, bucket in enumerate(buckets) if bucket.paths[0] in unit.paths]
