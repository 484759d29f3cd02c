"""The part of the model that one pipeline rank holds, and its passes over one microbatch."""

from typing import NamedTuple

import tensorflow as tf

from tfbig.model.context import make_context
from tfbig.model.gpt import GPT
from trainers.base import Batch
from trainers.gradients import BatchSums, microbatch


class Pending(NamedTuple):
    """A microbatch between its forward and its backward pass through a chunk."""

    tape: tf.GradientTape
    input: tf.Tensor | None
    output: tf.Tensor  # hidden state (b, T, D), or the loss sum


class Chunk:
    """Some consecutive blocks of the model, with the embedding and the head where they belong.

    Args:
      model: a GPT with a block range.
      num_microbatches: into which a step's batch is cut.
    """

    def __init__(self, model: GPT, num_microbatches: int) -> None:
        self.model = model
        self.variables: dict[str, tf.Variable] = {
            path: variable.value for path, variable in model.canonical_variables().items()
        }
        self._sources = list(self.variables.values())
        self._num_microbatches = num_microbatches
        self._totals: list[tf.Variable] = []
        self._function = tf.function(self._graph, autograph=False)
        self._set = tf.function(self._set_totals, autograph=False)
        self._add = tf.function(self._add_to_totals, autograph=False)
        self._pending: dict[int, Pending] = {}
        self._num_added = 0

    def forward(
        self, hidden: tf.Tensor | None, batch: Batch, index: int, step: tf.Tensor, training: bool
    ) -> tf.Tensor | BatchSums:
        """Returns the hidden state that leaves the chunk, or the loss sums of the last one.

        Args:
          hidden: what the chunk before made, None for the first.
          batch: this rank's copy of the step's batch.
          index: of the microbatch.
          step: scalar int64.
          training: keeps what the backward pass needs.
        """
        arguments = (hidden, dict(batch), tf.constant(index), step, training)
        if not training:
            return self._function(*arguments)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self._sources)
            if hidden is not None:
                tape.watch(hidden)
            result = self._function(*arguments)
        output = result.loss_sum if isinstance(result, BatchSums) else result
        self._pending[index] = Pending(tape, hidden, output)
        return result

    def backward(self, index: int, upstream: tf.Tensor | None) -> tf.Tensor | None:
        """Adds a microbatch's gradients to the totals; returns that of the chunk's input.

        Args:
          index: of the microbatch.
          upstream: gradient of the chunk's output, None for the last chunk.
        """
        tape, hidden, output = self._pending.pop(index)
        inputs = [] if hidden is None else [hidden]
        gradients = tape.gradient(output, inputs + self._sources, output_gradients=upstream)
        (self._add if self._num_added else self._set)(gradients[len(inputs) :])
        self._num_added += 1
        return gradients[0] if inputs else None

    def take_totals(self) -> dict[str, tf.Tensor]:
        """Returns the gradients summed over the step's microbatches, and begins anew."""
        assert self._num_added == self._num_microbatches and not self._pending
        self._num_added = 0
        return dict(zip(self.variables, self._totals, strict=True))

    def _graph(
        self,
        hidden: tf.Tensor | None,
        batch: Batch,
        index: tf.Tensor,
        step: tf.Tensor,
        training: bool,
    ) -> tf.Tensor | BatchSums:
        part = microbatch(batch, index, self._num_microbatches)
        context = make_context(part, step, training)
        tokens = part["tokens"]
        if self.model.has_embedding:
            hidden = self.model.embed(tokens[:, :-1], context)
        for block in self.model.transformer_blocks:
            hidden = block(hidden, context=context)
        if not self.model.has_head:
            return hidden
        return BatchSums(*self.model.head_loss(hidden, tokens[:, 1:], part["loss_mask"]))

    def _set_totals(self, gradients: list[tf.Tensor]) -> None:
        if not self._totals:
            self._totals = [
                tf.Variable(tf.zeros(source.shape), trainable=False, name="total")
                for source in self._sources
            ]
        for total, gradient in zip(self._totals, gradients, strict=True):
            total.assign(gradient)

    def _add_to_totals(self, gradients: list[tf.Tensor]) -> None:
        for total, gradient in zip(self._totals, gradients, strict=True):
            total.assign_add(gradient)
