"""The whole update on every rank of a data group, after an all-reduce of the gradients."""

from collections.abc import Iterator, Mapping, Sequence

import tensorflow as tf

from tfbig.checkpoint_format import Slice
from tfbig.config import Config
from tfbig.optimizer import Decision, Optimizer, squared_norms_by_layer
from tfbig.variables import variable_rule
from trainers.base import StateReader
from trainers.buckets import flatten, unflatten
from trainers.clock import Clock
from trainers.collectives import Group
from trainers.gradients import Gradients
from trainers.tensor_state import TensorState
from trainers.tensor_table import Shard

COUNT = "optimizer/iterations"


class CopiedOptimizer:
    """Does what ShardedOptimizer does, with all state on each rank.

    Args:
      config: of the run.
      variables: this rank's weights by path.
      shards: what they are of the model's variables.
      buckets: paths whose gradients travel together.
      group: the data group.
      training: whether there are slots.
    """

    holds_weights = False  # these are the variables' own

    def __init__(
        self,
        config: Config,
        variables: Mapping[str, tf.Variable],
        shards: Mapping[str, Shard],
        buckets: Sequence[Sequence[str]],
        group: Group,
        training: bool = True,
    ) -> None:
        self._num_layers, self._shards = config.model.num_layers, shards
        self._buckets, self._group = buckets, group
        self._shapes = {path: variable.shape for path, variable in variables.items()}
        decayed = {path: variable_rule(path).decayed for path in variables}
        self._rule = Optimizer(config.optimizer, variables, decayed, training)
        slots = {path: slot for path, slot in self._rule.state().items() if path != COUNT}
        self._slots = TensorState(shards, {}, slots, False)

    def state(self) -> dict[str, tf.Variable]:
        """Returns what every rank of the mesh holds, by checkpoint path."""
        return {COUNT: self._rule.iterations}

    def averages(self) -> Mapping[str, tf.Variable]:
        """Returns the moving average of each weight, by path."""
        return self._rule.averages()

    def restart_averages(self) -> None:
        """Sets the averages to the weights, which were just replaced."""
        self._rule.restart_averages()

    def reduce(self, gradients: Gradients, clock: Clock | None = None) -> Gradients:
        """Returns the gradients' sums over the group."""
        if self._group.size == 1:
            return gradients
        reduced: Gradients = {}
        for index, paths in enumerate(self._buckets):
            flat = flatten(gradients, paths)
            flat = self._group.all_reduce(flat, f"gradients_{index}", clock=clock)
            reduced |= unflatten(flat, self._shapes, paths)
        return reduced

    def squares_by_layer(self, gradients: Gradients) -> tf.Tensor:
        """Returns this rank's share (layers,) of the sums of squares over the whole model."""
        counted = {path: g for path, g in gradients.items() if self._shards[path].is_counted}
        return squared_norms_by_layer(counted, self._num_layers)

    def apply(
        self,
        gradients: Gradients,
        learning_rate: tf.Tensor,
        decision: Decision,
        clock: Clock | None = None,
    ) -> None:
        """Updates the variables in place."""
        self._rule.apply(gradients, learning_rate, decision)

    def slices(self) -> Iterator[Slice]:
        """Yields this rank's slices of slots and averages."""
        return self._slots.slices()

    def slices_of(self, gradients: Gradients) -> Iterator[Slice]:
        """Yields slices of tensors laid out as the variables."""
        return self._slots.slices_of(gradients)

    def load(self, reader: StateReader, weights_only: bool) -> list[str]:
        """Fills slots and averages; returns the paths that the checkpoint lacks."""
        return [] if weights_only else self._slots.load(reader, False)
