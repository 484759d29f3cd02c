"""What follows a step's passes on a mesh: reductions, the decision, the optimizer; one graph."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfbig.config import Config
from tfbig.loss_scale import LossScale
from tfbig.optimizer import decide, mean_norms
from trainers.base import Batch, StepResult
from trainers.buckets import flatten, unflatten
from trainers.clock import Clock
from trainers.collectives import Group
from trainers.copied_optimizer import CopiedOptimizer
from trainers.gradients import Gradients
from trainers.sharded_optimizer import Parts, ShardedOptimizer
from trainers.step_totals import pack, unpack
from trainers.tensor_table import TOKEN_TABLE, Shard


class MeshGroups(NamedTuple):
    """The groups this rank belongs to."""

    world: Group
    data: Group
    tensor: Group
    tied: Group | None  # first and last stage, on ranks of these where the head is tied


class Update:
    """Reduces gradients and sums over the mesh and applies one optimizer update.

    Args:
      config: of the run.
      shards: of this rank's variables, by path.
      groups: this rank's.
      optimizer: over this rank's variables and their data group.
      loss_scale: of float16.
      num_sources: of the data.
      sums_here: whether this rank's loss sums count: one rank of the last stage a replica.
    """

    def __init__(
        self,
        config: Config,
        shards: Mapping[str, Shard],
        groups: MeshGroups,
        optimizer: CopiedOptimizer | ShardedOptimizer,
        loss_scale: LossScale,
        num_sources: int,
        sums_here: bool,
    ) -> None:
        self._config, self._shards, self._groups = config, shards, groups
        self._optimizer, self._loss_scale = optimizer, loss_scale
        self._num_sources, self._sums_here = num_sources, sums_here
        self._num_layers = config.model.num_layers + 2  # embedding and head too
        self._shapes = {path: tf.TensorShape(s.local_shape) for path, s in shards.items()}
        self.run = tf.function(self._graph, autograph=False)
        self.reduce = tf.function(self._reduce, autograph=False)

    def _reduce(self, gradients: Gradients | Parts, clock: Clock | None = None) -> Any:
        """Returns gradients summed over all ranks that hold a share of them."""
        if not isinstance(gradients, dict):
            return gradients  # parts: passes unit by unit have summed them on the way
        reduced = dict(gradients)
        sequence_parallel = self._config.parallel.sequence_parallel
        replicated = [p for p, s in self._shards.items() if s.shares_gradient(sequence_parallel)]
        if replicated and self._groups.tensor.size > 1:
            flat = flatten(reduced, replicated)
            flat = self._groups.tensor.all_reduce(flat, "replicated", clock=clock)
            reduced |= unflatten(flat, self._shapes, replicated)
        if self._groups.tied is not None and TOKEN_TABLE in reduced:
            table = self._groups.tied.all_reduce(reduced[TOKEN_TABLE], "table", clock=clock)
            reduced[TOKEN_TABLE] = table
        return self._optimizer.reduce(reduced, clock)

    def _graph(
        self,
        totals: Gradients | Parts,
        batch: Batch,
        row_sums: Sequence[tuple[tf.Tensor, tf.Tensor]],
        learning_rate: tf.Tensor,
        max_loss: tf.Tensor,
        signal: tf.Tensor,
    ) -> tuple[StepResult, dict[str, tf.Tensor]]:
        """Returns the step's result, equal on every rank, and when collectives were in flight.

        Args:
          totals: gradients of this rank's passes, by path.
          batch: this rank's.
          row_sums: (loss sum (b,), tokens (b,)) of each microbatch; empty but on the last stage.
          learning_rate: scalar float32.
          max_loss: scalar float32.
          signal: scalar int32.
        """
        clock = Clock()
        gradients = self._reduce(totals, clock)
        squares = tf.cast(self._optimizer.squares_by_layer(gradients), tf.float64)  # (layers,)
        vector = tf.concat([squares, self._sums(batch, row_sums, signal)], 0)
        # Every rank takes part, so that none goes on, or ends, before all have come this far.
        vector = self._groups.world.all_reduce(vector, "sums", clock=clock)
        squares = tf.cast(vector[: self._num_layers], tf.float32)
        sums = unpack(vector[self._num_layers :], self._num_sources)
        scale, scale_of_sum = self._loss_scale.value(), self._loss_scale.of_the_sum()
        decision = decide(
            self._config.optimizer,
            tf.reduce_sum(squares),
            sums.loss_sum,
            sums.num_tokens,
            max_loss,
            scale_of_sum,
        )
        with tf.name_scope("optimizer"):  # captures of steps tell it by this
            self._optimizer.apply(gradients, learning_rate, decision, clock)
        self._loss_scale.update(decision.finite)
        layer_norms = tf.zeros([0])
        if self._config.run.layer_grad_norms:
            layer_norms = mean_norms(squares, sums.num_tokens, scale_of_sum)
        result = StepResult(
            **sums._asdict(),
            grad_norm=decision.grad_norm,
            applied=decision.applied,
            loss_scale=scale,
            layer_grad_norms=layer_norms,
        )
        return result, clock.intervals()

    def _sums(
        self,
        batch: Batch,
        row_sums: Sequence[tuple[tf.Tensor, tf.Tensor]],
        signal: tf.Tensor,
    ) -> tf.Tensor:
        """Returns (2 + 2 sources + signals,) float64; the signal is a one-hot, so sums carry it."""
        if row_sums and self._sums_here:
            row_loss, row_tokens = (tf.concat(parts, 0) for parts in zip(*row_sums, strict=True))
        else:
            row_loss = row_tokens = tf.zeros(batch["source_index"].shape)
        return pack(row_loss, row_tokens, batch["source_index"], signal, self._num_sources)
