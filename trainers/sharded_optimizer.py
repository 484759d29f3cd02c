"""Optimizer state that the ranks of a data group share: each updates its slices (ZeRO-1).

Gradients are reduce-scattered, a rank's slice is updated, and the new weights are all-gathered:
as many bytes as an all-reduce of the gradients takes. Source: Rajbhandari et al., ZeRO
(arXiv 1910.02054, sections 5.1 and 7).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import tensorflow as tf

from tfbig.checkpoint_format import Slice
from tfbig.config import Config
from tfbig.flat_optimizer import FlatOptimizer
from tfbig.optimizer import Decision, squared_norms_by_layer
from trainers.base import StateReader
from trainers.clock import Clock
from trainers.collectives import Group
from trainers.flat_buckets import FlatBucket
from trainers.shared_buckets import SharedBuckets, joined
from trainers.tensor_table import Shard

Parts = list[tf.Tensor]  # (part_size,) float32 of each bucket


class ShardedOptimizer:
    """The update of one rank's parts of flat buckets.

    Where a weight is kept in a narrower dtype than float32, its exact value is kept here, in the
    part that this rank updates, and nowhere else.

    Args:
      config: of the run.
      variables: this rank's trained weights by path; None where it has only its parts.
      shards: what they are of the model's variables.
      buckets: that the trained weights lie in.
      group: the data group.
      training: whether there are slots.
    """

    def __init__(
        self,
        config: Config,
        variables: Mapping[str, tf.Variable] | None,
        shards: Mapping[str, Shard],
        buckets: Sequence[FlatBucket],
        group: Group,
        training: bool = True,
    ) -> None:
        self._num_layers = config.model.num_layers
        self._variables, self.shards = dict(variables or {}), shards
        self._shared, self._group = SharedBuckets(buckets, group, shards), group
        self.buckets = self._shared.buckets
        self._rule = FlatOptimizer(
            config.optimizer,
            [bucket.part_size for bucket in buckets],
            [bucket.decayed_in(group.rank) for bucket in buckets],
            training,
            config.parallel.offload_optimizer_state,
        )
        self._exact: list[tf.Variable] = []
        is_narrow = any(variable.dtype != tf.float32 for variable in self._variables.values())
        if variables is None or (is_narrow and training):
            with self._rule.device():
                self._exact = self._shared.new_parts("exact")
        self._state = self._shared.state
        self._gathered_averages = tf.function(self._gather_averages, autograph=False)

    def state(self) -> dict[str, tf.Variable]:
        """Returns what every rank holds, by checkpoint path."""
        return {"optimizer/iterations": self._rule.iterations}

    def begin(self, value_of: Callable[[str], tf.Tensor]) -> None:
        """Takes exact weights and averages from float32 values by path: the initial ones."""
        for index in range(len(self.buckets)):
            parts = self._exact[index : index + 1]
            parts += self._rule.slots.get("ema/", [])[index : index + 1]
            if parts:
                value = self._shared.own(index, value_of)
                for part in parts:
                    part.assign(value)

    def restart_averages(self) -> None:
        """Sets the averages to the weights, which were just replaced."""
        if "ema/" in self._rule.slots:
            for index, average in enumerate(self._rule.slots["ema/"]):
                average.assign(self._weights(index))

    def averages(self) -> dict[str, tf.Tensor]:
        """Returns the moving average of each weight, gathered from all ranks, by path."""
        inside = tf.inside_function()  # where collectives stand in no function of their own
        return self._gather_averages() if inside else self._gathered_averages()

    def _gather_averages(self) -> dict[str, tf.Tensor]:
        return {
            path: value
            for index, part in enumerate(self._rule.slots.get("ema/", []))
            for path, value in self._shared.gathered(
                index, part.read_value(), f"average_{index}", None
            ).items()
        }

    def reduce(self, gradients: Mapping[str, tf.Tensor], clock: Clock | None = None) -> Parts:
        """Returns this rank's parts of the gradients' sums over the group.

        Buckets are in the order in which backward makes their gradients. Two are under way at a
        time: Horovod sums one after the other, but makes room for a result when it is told of it.
        """
        parts: Parts = []
        for index in range(len(self.buckets)):
            with tf.control_dependencies(parts[-2:-1]):
                parts.append(self.reduce_bucket(index, gradients, f"scatter_{index}", clock))
        return parts

    def reduce_bucket(
        self, index: int, gradients: Mapping[str, tf.Tensor], name: str, clock: Clock | None
    ) -> tf.Tensor:
        """Returns this rank's part (part_size,) of a bucket's summed gradients.

        Args:
          index: of the bucket.
          gradients: by path; those of other buckets are not looked at.
          name: of the collective.
          clock: notes the time in flight.
        """
        bucket = self.buckets[index]
        flat = joined(bucket, [gradients[path] for path in bucket.paths])
        part = self._group.reduce_scatter(flat, name, clock=clock)
        return tf.ensure_shape(part, [bucket.part_size])

    def gather_bucket(
        self,
        index: int,
        name: str,
        after: Sequence[tf.Tensor],
        clock: Clock | None = None,
        prefix: str = "",
    ) -> dict[str, tf.Tensor]:
        """Returns a bucket's whole weights, float32, by path.

        Args:
          index: of the bucket.
          name: of the collective.
          after: what must be there before the gathering begins.
          clock: notes the time in flight.
          prefix: "ema/" gives the averages instead.
        """
        parts = self._rule.slots[prefix] if prefix else self._exact
        return self._shared.read_gathered(index, parts[index], name, after, clock)

    def squares_by_layer(self, gradients: Parts) -> tf.Tensor:
        """Returns this rank's share (layers,) of the sums of squares over the whole model."""
        counted = {
            piece.path: part[piece.offset : piece.offset + piece.stop - piece.start]
            for bucket, part in zip(self.buckets, gradients, strict=True)
            for piece in bucket.pieces(self._group.rank)
            if self.shards[piece.path].is_counted_in_replica
        }
        return squared_norms_by_layer(counted, self._num_layers)

    def apply(
        self,
        gradients: Parts,
        learning_rate: tf.Tensor,
        decision: Decision,
        clock: Clock | None = None,
    ) -> None:
        """Updates this rank's parts and gives every rank the new weights.

        Args:
          gradients: of `reduce`.
          learning_rate: scalar float32.
          decision: of `decide`, equal on all ranks.
          clock: notes the time in flight.
        """
        assigned: list[list[tf.Operation]] = [[], []]
        for index in range(len(self.buckets)):
            # Two buckets at a time: all of them gathered at once, or all gradients scaled, would be
            # the step's peak.
            with tf.control_dependencies(assigned[-2]):
                weights, gradient = tf.identity(self._weights(index)), tf.identity(gradients[index])
            new = self._rule.updated(index, weights, gradient, learning_rate, decision)
            assigned.append([])
            if self._exact:
                assigned[-1].append(self._exact[index].assign(new, read_value=False))
            if self._variables:
                gathered = self._shared.gathered(index, new, f"gather_{index}", clock)
                for path, value in gathered.items():
                    variable = self._variables[path]
                    value = tf.cast(value, variable.dtype)
                    assigned[-1].append(variable.assign(value, read_value=False))
        self._rule.count(decision)

    def slices(self) -> Iterator[Slice]:
        """Yields this rank's rectangles of slots and averages, and of weights it alone has."""
        for prefix, parts in self._rule.slots.items():
            yield from self._state.slices(prefix, parts)
        if self._exact:
            yield from self._state.slices("", self._exact)

    @property
    def holds_weights(self) -> bool:
        """Whether `slices` has the weights, so that the variables' own are left out."""
        return bool(self._exact)

    def slices_of(self, parts: Parts) -> Iterator[Slice]:
        """Yields this rank's rectangles of tensors laid out as the buckets' parts."""
        return self._state.slices("", parts)

    def load(self, reader: StateReader, weights_only: bool) -> list[str]:
        """Fills slots, averages and exact weights; returns the paths that the checkpoint lacks."""
        missing = []
        if not weights_only:
            for prefix, parts in self._rule.slots.items():
                missing += self._state.load(reader, prefix, parts)
        if self._exact:
            lacking = self._state.load(reader, "", self._exact)
            missing += [] if self._variables else lacking  # variables say so themselves
        return missing

    def _weights(self, index: int) -> tf.Tensor:
        """Returns this rank's part of a bucket's weights, float32."""
        if self._exact:
            return self._exact[index].read_value()
        return self._shared.own(index, lambda path: self._variables[path].read_value())
