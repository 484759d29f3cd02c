"""The parts of the model that one pipeline rank holds, and their passes over one microbatch."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tfbig.model.context import Context, make_context
from tfbig.model.gpt import GPT
from tfbig.variables import is_trained
from trainers.base import Batch
from trainers.gradients import BatchSums, microbatch
from trainers.passes import Passes, flat_function


class Pending(NamedTuple):
    """A microbatch between its forward and its backward pass through a chunk."""

    passes: Passes
    arguments: list[tf.Tensor]
    kept: Sequence[tf.Tensor]


class Chunk:
    """Some consecutive blocks of the model, with the embedding and the head where they belong.

    Passes get the weights as arguments, in the compute dtype and made once a step: what is kept of
    a forward pass for its backward pass then holds no copy of them for each microbatch.

    Args:
      model: a GPT with a block range.
      training: whether there will be backward passes.
      jit_compile: whether XLA compiles the passes; never where they hold collectives.
      freeze: of OptimizerConfig.

    Attributes:
      variables: by canonical path, those that are trained first.
      trained: paths of these.
    """

    def __init__(
        self,
        model: GPT,
        training: bool = True,
        jit_compile: bool = False,
        freeze: Sequence[str] = (),
    ) -> None:
        self.model = model
        self._jit_compile = jit_compile
        found = model.canonical_variables()
        self.trained = [path for path in found if is_trained(path, model.config, freeze)]
        found = {path: found[path] for path in [*self.trained, *found]}
        self._keras_variables: list[keras.Variable] = list(found.values())
        self.variables: dict[str, tf.Variable] = {path: v.value for path, v in found.items()}
        self._weights: list[tf.Tensor] = []
        self._totals = (
            [
                tf.Variable(tf.zeros(variable.shape), trainable=False, name="total")
                for variable in self._keras_variables[: len(self.trained)]
            ]
            if training
            else []
        )
        self._passes: dict[tuple, Passes] = {}
        # Nothing before it can be trained, so that a chunk of frozen weights has no backward pass.
        self._has_backward = bool(self.trained) or not model.has_embedding
        self._pending: dict[int, Pending] = {}
        self._num_added = 0
        self._accumulate: dict[bool, Callable] = {}
        self._forward_alone = tf.function(self._pass, autograph=False)
        self._read = tf.function(self._read_weights, autograph=False)

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
    ) -> tf.Tensor | BatchSums:
        """Returns the hidden state that leaves the chunk, or the loss sums of the last one.

        Args:
          hidden: what the chunk before made, None for the first.
          batch: this rank's copy of the step's batch.
          index: of the microbatch.
          num_microbatches: into which the batch is cut.
          step: scalar int64, on which dropout depends.
        """
        if not self._has_backward:
            return self._run(hidden, batch, index, num_microbatches, step, True)
        key = (num_microbatches, *sorted((name, tuple(x.shape)) for name, x in batch.items()))
        if key not in self._passes:
            self._passes[key] = self._make_passes(batch, num_microbatches)
        inputs = [] if hidden is None else [hidden]
        num_trained = len(self.trained)
        trained, frozen = self._weights[:num_trained], self._weights[num_trained:]
        arguments = [*trained, *inputs, *frozen, tf.constant(index), step, *_in_order(batch)]
        results, kept = self._passes[key].forward(arguments)
        self._pending[index] = Pending(self._passes[key], arguments, kept)
        return BatchSums(*results) if self.model.has_head else results[0]

    def backward(self, index: int, upstream: tf.Tensor | None) -> tf.Tensor | None:
        """Adds a microbatch's gradients to the totals; returns that of the chunk's input.

        Nothing is done, and None returned, where what the chunk is differentiated by is empty.

        Args:
          index: of the microbatch.
          upstream: gradient of the chunk's output; of the last chunk's loss sum, None means 1.
        """
        if not self._has_backward:
            return None
        passes, arguments, kept = self._pending.pop(index)
        gradients = passes.backward(
            arguments, kept, tf.constant(1.0) if upstream is None else upstream
        )
        num_weights = len(self.trained)
        if not self._accumulate:
            specs = [tf.TensorSpec.from_tensor(weight) for weight in self._weights[:num_weights]]
            self._accumulate = {
                is_first: flat_function(functools.partial(self._add, is_first), specs)
                for is_first in (True, False)
            }
        self._accumulate[self._num_added == 0](*gradients[:num_weights])
        self._num_added += 1
        return gradients[num_weights] if len(gradients) > num_weights else None

    def evaluate(
        self, hidden: tf.Tensor | None, batch: Batch, index: int, num_microbatches: int
    ) -> tf.Tensor | BatchSums:
        """Returns what `forward` returns, without dropout and with nothing kept."""
        no_dropout = tf.constant(0, tf.int64)
        return self._run(hidden, batch, index, num_microbatches, no_dropout, False)

    def _run(
        self,
        hidden: tf.Tensor | None,
        batch: Batch,
        index: int,
        num_microbatches: int,
        step: tf.Tensor,
        training: bool,
    ) -> tf.Tensor | BatchSums:
        """Returns what `forward` returns, with nothing kept."""
        arguments = (hidden, dict(batch), tf.constant(index), num_microbatches, step, training)
        return self._forward_alone(self._weights, *arguments)

    def take_totals(self) -> dict[str, tf.Tensor]:
        """Returns the gradients summed over the step's microbatches, and begins anew."""
        self._num_added = 0
        return dict(zip(self.trained, self._totals, strict=True))

    def _scope(self, weights: Sequence[tf.Tensor]) -> keras.StatelessScope:
        scope = keras.StatelessScope()
        for variable, value in zip(self._keras_variables, weights, strict=True):
            scope.add_update((variable, value))  # the constructor's mapping would cast to float32
        return scope

    def _read_weights(self, values: Mapping[str, tf.Variable] | None) -> list[tf.Tensor]:
        weights = self.model.compute_weights(values or self.variables)
        return [tf.identity(value) for value in weights.values()]

    def _make_passes(self, batch: Batch, num_microbatches: int) -> Passes:
        """Returns the training passes over one microbatch of such a batch."""
        names, num_weights, num_trained = sorted(batch), len(self._weights), len(self.trained)
        specs = [tf.TensorSpec.from_tensor(weight) for weight in self._weights]
        size, length = batch["tokens"].shape[0] // num_microbatches, batch["tokens"].shape[1] - 1
        hidden_spec = tf.TensorSpec(
            [size, self.model.split.own_length(length), self.model.config.embed_dim],
            self.model.compute_dtype,
        )
        inputs = [] if self.model.has_embedding else [hidden_spec]

        def run(*arguments: tf.Tensor) -> Sequence[tf.Tensor]:
            trained, rest = arguments[:num_trained], list(arguments[num_trained:])
            hidden = rest.pop(0) if inputs else None
            num_frozen = num_weights - num_trained
            weights, rest = [*trained, *rest[:num_frozen]], rest[num_frozen:]
            index, step, *values = rest
            part = dict(zip(names, values, strict=True))
            result = self._pass(weights, hidden, part, index, num_microbatches, step, True)
            return list(result) if isinstance(result, BatchSums) else [result]

        return Passes(
            run,
            [
                *specs[:num_trained],
                *inputs,
                *specs[num_trained:],
                tf.TensorSpec([], tf.int32),
                tf.TensorSpec([], tf.int64),
                *map(tf.TensorSpec.from_tensor, _in_order(batch)),
            ],
            num_trained + len(inputs),
            tf.TensorSpec([], tf.float32) if self.model.has_head else hidden_spec,
            self._jit_compile,
        )

    def _pass(
        self,
        weights: Sequence[tf.Tensor],
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
            labels, mask = tokens[:, 1:], part["loss_mask"]
            return BatchSums(*self.model.head_loss(hidden, labels, mask, training))

    def _blocks(self, hidden: tf.Tensor | None, tokens: tf.Tensor, context: Context) -> tf.Tensor:
        if self.model.has_embedding:
            hidden = self.model.embed(tokens, context)
        return self.model.run_blocks(hidden, context)

    def _add(self, is_first: bool, *gradients: tf.Tensor) -> list[tf.Tensor]:
        """Adds one microbatch's gradients to the totals, or begins them with the first one's."""
        for total, gradient in zip(self._totals, gradients, strict=True):
            gradient = tf.cast(gradient, tf.float32)
            total.assign(gradient) if is_first else total.assign_add(gradient)
        return []


def _in_order(batch: Batch) -> list[tf.Tensor]:
    return [batch[name] for name in sorted(batch)]
