"""The parts of the model that one pipeline rank holds, and their passes over one microbatch."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tfbig.model.context import Context, make_context
from tfbig.model.gpt import GPT
from trainers.base import Batch
from trainers.gradients import BatchSums, microbatch
from trainers.token_history import TokenHistory


class Pending(NamedTuple):
    """A microbatch between its forward and its backward pass through a chunk."""

    tape: tf.GradientTape
    input: tf.Tensor | None
    output: tf.Tensor  # hidden state (b, T, D), or the loss sum


class Chunk:
    """Some consecutive blocks of the model, with the embedding and the head where they belong.

    Passes get the weights as arguments, in the compute dtype and made once a step: what TensorFlow
    keeps of a forward pass for its backward pass then holds no copy of them for each microbatch.

    Args:
      model: a GPT with a block range.
      jit_compile: whether XLA compiles the passes; never where they hold collectives.
    """

    def __init__(self, model: GPT, jit_compile: bool = False) -> None:
        self.model = model
        self._keras_variables: list[keras.Variable] = list(model.canonical_variables().values())
        self.variables: dict[str, tf.Variable] = {
            path: variable.value for path, variable in model.canonical_variables().items()
        }
        self._weights: list[tf.Tensor] = []
        self._totals: list[tf.Variable] = []
        self._pending: dict[int, Pending] = {}
        self._num_added = 0
        self._run = tf.function(self._graph, autograph=False, jit_compile=jit_compile or None)
        self._run_decode = tf.function(self._decode_graph, autograph=False)
        self._read = tf.function(self._read_weights, autograph=False)
        self._set = tf.function(self._set_totals, autograph=False)
        self._add = tf.function(self._add_to_totals, autograph=False)

    def begin(self, values: Mapping[str, tf.Variable] | None = None) -> None:
        """Reads the weights; before the first pass of a step or an evaluation.

        Args:
          values: stand in for the model's variables, by path.
        """
        self._weights = self._read(values)

    def end(self) -> None:
        """Lets go of the weights, so that the optimizer can change them in place."""
        assert not self._pending
        self._weights = []

    def forward(
        self,
        hidden: tf.Tensor | None,
        batch: Batch,
        index: int,
        num_microbatches: int,
        step: tf.Tensor,
        training: bool,
    ) -> tf.Tensor | BatchSums:
        """Returns the hidden state that leaves the chunk, or the loss sums of the last one.

        Args:
          hidden: what the chunk before made, None for the first.
          batch: this rank's copy of the step's batch.
          index: of the microbatch.
          num_microbatches: into which the batch is cut.
          step: scalar int64.
          training: turns dropout on and keeps what the backward pass needs.
        """
        arguments = (hidden, dict(batch), tf.constant(index), num_microbatches, step, training)
        if not training:
            return self._run(self._weights, *arguments)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self._weights)
            if hidden is not None:
                tape.watch(hidden)
            result = self._run(self._weights, *arguments)
        output = result.loss_sum if isinstance(result, BatchSums) else result
        self._pending[index] = Pending(tape, hidden, output)
        return result

    def backward(self, index: int, upstream: tf.Tensor | None) -> tf.Tensor | None:
        """Adds a microbatch's gradients to the totals; returns that of the chunk's input.

        Args:
          index: of the microbatch.
          upstream: gradient of the chunk's output; of the last chunk's loss sum, None means 1.
        """
        tape, hidden, output = self._pending.pop(index)
        inputs = [] if hidden is None else [hidden]
        gradients = tape.gradient(output, inputs + self._weights, output_gradients=upstream)
        (self._add if self._num_added else self._set)(gradients[len(inputs) :])
        self._num_added += 1
        return gradients[0] if inputs else None

    def take_totals(self) -> dict[str, tf.Tensor]:
        """Returns the gradients summed over the step's microbatches, and begins anew."""
        self._num_added = 0
        return dict(zip(self.variables, self._totals, strict=True))

    def decode(self, hidden: tf.Tensor | None, history: TokenHistory) -> tf.Tensor:
        """Returns the hidden state (B, L, D), or the last chunk's logits (B, V) of the last tokens.

        Args:
          hidden: what the chunk before made, None for the first.
          history: the tokens.
        """
        return self._run_decode(self._weights, hidden, history)

    def _scope(self, weights: Sequence[tf.Tensor]) -> keras.StatelessScope:
        scope = keras.StatelessScope()
        for variable, value in zip(self._keras_variables, weights, strict=True):
            scope.add_update((variable, value))  # the constructor's mapping would cast to float32
        return scope

    def _read_weights(self, values: Mapping[str, tf.Variable] | None) -> list[tf.Tensor]:
        weights = self.model.compute_weights(values or self.variables)
        return [tf.identity(value) for value in weights.values()]

    def _graph(
        self,
        weights: list[tf.Tensor],
        hidden: tf.Tensor | None,
        batch: Batch,
        index: tf.Tensor,
        num_microbatches: int,
        step: tf.Tensor,
        training: bool,
    ) -> tf.Tensor | BatchSums:
        part = microbatch(batch, index, num_microbatches)
        context = make_context(part, step, training)
        tokens = part["tokens"]
        with self._scope(weights):
            hidden = self._blocks(hidden, tokens[:, :-1], context)
            if not self.model.has_head:
                return hidden
            return BatchSums(*self.model.head_loss(hidden, tokens[:, 1:], part["loss_mask"]))

    def _blocks(self, hidden: tf.Tensor | None, tokens: tf.Tensor, context: Context) -> tf.Tensor:
        if self.model.has_embedding:
            hidden = self.model.embed(tokens, context)
        for block in self.model.transformer_blocks:
            hidden = block(hidden, context=context)
        return hidden

    def _decode_graph(
        self, weights: list[tf.Tensor], hidden: tf.Tensor | None, history: TokenHistory
    ) -> tf.Tensor:
        num_rows, max_length = history.tokens.shape
        context = Context(
            step=tf.constant(0, tf.int64),
            sample_index=tf.range(num_rows, dtype=tf.int64),
            position=tf.range(max_length),
            document_ids=None,
            training=False,
        )
        with self._scope(weights), self.model.split.whole_positions():
            hidden = self._blocks(hidden, history.tokens, context)  # (B, L, D)
            if not self.model.has_head:
                return hidden
            last = tf.maximum(history.length - 1, 0)
            last = tf.gather(hidden, last, batch_dims=1)[:, tf.newaxis]  # (B, 1, D)
            return tf.cast(self.model.logits(last)[:, 0], tf.float32)  # (B, V of this rank)

    def _set_totals(self, gradients: list[tf.Tensor]) -> None:
        if not self._totals:
            self._totals = [
                tf.Variable(tf.zeros(variable.shape), trainable=False, name="total")
                for variable in self._keras_variables
            ]
        for total, gradient in zip(self._totals, gradients, strict=True):
            total.assign(tf.cast(gradient, tf.float32))

    def _add_to_totals(self, gradients: list[tf.Tensor]) -> None:
        for total, gradient in zip(self._totals, gradients, strict=True):
            total.assign_add(tf.cast(gradient, tf.float32))
