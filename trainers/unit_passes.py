"""A unit's passes over one microbatch, as functions of its weights."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfbig.model.context import Context, make_context
from tfbig.model.gpt import GPT
from trainers.base import Batch
from trainers.gradients import BatchSums
from trainers.model_units import Unit
from trainers.passes import Passes


class UnitPasses:
    """The forward and backward pass of one unit of a model.

    Args:
      model: a whole model; its own variables are not read.
      unit: which part of it.
      jit_compile: whether XLA compiles the passes, each by itself.
    """

    def __init__(self, model: GPT, unit: Unit, jit_compile: bool) -> None:
        self.unit = unit
        self._model, self._jit_compile = model, jit_compile
        self._passes: dict[tuple, Passes] = {}

    def training(self, batch: Batch) -> Passes:
        """Returns the passes over a microbatch of such shapes.

        They take the trained weights in the compute dtype, the hidden state (b, T, D) except for
        the embedding, the frozen weights, the step, and the batch's fields in order of their names.
        They are differentiated by the first two.
        """
        key = tuple(sorted((name, tuple(value.shape)) for name, value in batch.items()))
        if key not in self._passes:
            with tf.init_scope():
                self._passes[key] = self._make(dict(key))
        return self._passes[key]

    def arguments(
        self, weights: Sequence[tf.Tensor], hidden: tf.Tensor | None, step: tf.Tensor, batch: Batch
    ) -> list[tf.Tensor]:
        """Returns the passes' arguments in order, of weights in the order of `unit.paths`."""
        num_trained = len(self.unit.trained)
        inputs = [] if hidden is None else [hidden]
        fields = [batch[name] for name in sorted(batch)]
        return [*weights[:num_trained], *inputs, *weights[num_trained:], step, *fields]

    def forward(
        self, weights: Sequence[tf.Tensor], hidden: tf.Tensor | None, step: tf.Tensor, batch: Batch
    ) -> tf.Tensor | BatchSums:
        """Returns what `run` does in training, for a unit that has no backward pass."""
        if not self._jit_compile:
            return self.run(weights, hidden, step, batch, True)
        compiled = tf.function(self.run, autograph=False, jit_compile=True)
        return compiled(list(weights), hidden, step, dict(batch), True)

    def run(
        self,
        weights: Sequence[tf.Tensor],
        hidden: tf.Tensor | None,
        step: tf.Tensor,
        batch: Batch,
        training: bool,
    ) -> tf.Tensor | BatchSums:
        """Returns the hidden state (b, T, D) that leaves the unit, or the head's sums."""
        tokens = batch["tokens"]
        context = make_context(batch, step, training)
        with self.scope(weights):
            hidden = self.hidden(hidden, tokens[:, :-1], context)
            if not self.unit.has_head:
                return hidden
            labels, mask = tokens[:, 1:], batch["loss_mask"]
            return BatchSums(*self._model.head_loss(hidden, labels, mask, training))

    def hidden(self, hidden: tf.Tensor | None, tokens: tf.Tensor, context: Context) -> tf.Tensor:
        """Returns the hidden state (b, T, D) that leaves the unit, within `scope`.

        Args:
          hidden: what enters it, None for the embedding.
          tokens: (b, T).
          context: of the tokens.
        """
        if self.unit.has_embedding:
            hidden = self._model.embed(tokens, context)
        for block in self._model.transformer_blocks[slice(*self.unit.blocks)]:
            hidden = block(hidden, context=context)
        return hidden

    def scope(self, weights: Sequence[tf.Tensor]) -> keras.StatelessScope:
        """Returns a scope in which the model's layers compute with these weights."""
        variables = self._model.canonical_variables()
        scope = keras.StatelessScope(initialize_variables=False)
        for path, weight in zip(self.unit.paths, weights, strict=True):
            scope.add_update((variables[path], weight))
        return scope

    def _make(self, shapes: dict[str, tuple[int, ...]]) -> Passes:
        model, unit = self._model, self.unit
        variables = model.canonical_variables()
        weights = [tf.TensorSpec(variables[p].shape, model.weight_dtype(p)) for p in unit.paths]
        num_trained, num_frozen = len(unit.trained), len(unit.frozen)
        rows, length = shapes["tokens"][0], shapes["tokens"][1] - 1
        own_length = model.split.own_length(length)
        hidden = tf.TensorSpec([rows, own_length, model.config.embed_dim], model.compute_dtype)
        inputs = [] if unit.has_embedding else [hidden]
        names, dtypes = sorted(shapes), FIELD_DTYPES

        def run(*arguments: tf.Tensor) -> Sequence[tf.Tensor]:
            trained, rest = arguments[:num_trained], list(arguments[num_trained:])
            entering = rest.pop(0) if inputs else None
            own, rest = [*trained, *rest[:num_frozen]], rest[num_frozen:]
            step, *values = rest
            part = dict(zip(names, values, strict=True))
            result = self.run(own, entering, step, part, True)
            return list(result) if isinstance(result, BatchSums) else [result]

        return Passes(
            run,
            [
                *weights[:num_trained],
                *inputs,
                *weights[num_trained:],
                tf.TensorSpec([], tf.int64),
                *(tf.TensorSpec(shapes[name], dtypes[name]) for name in names),
            ],
            num_trained + len(inputs),
            tf.TensorSpec([], tf.float32) if unit.has_head else hidden,
            self._jit_compile,
        )


FIELD_DTYPES = {
    "tokens": tf.int32,
    "sample_index": tf.int64,
    "source_index": tf.int32,
    "loss_mask": tf.uint8,
    "document_ids": tf.int32,
}
