"""The gradient of a batch's summed loss on one process, microbatch by microbatch."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import tensorflow as tf

from tfbig.model.context import make_context
from tfbig.model.gpt import GPT
from trainers.base import Batch

Gradients = dict[str, tf.Tensor]


class BatchSums(NamedTuple):
    """What a forward pass adds up, by row (B,) of its batch."""

    loss_sum: tf.Tensor  # scalar; the only differentiable part
    row_loss_sum: tf.Tensor
    row_num_tokens: tf.Tensor
    row_num_correct: tf.Tensor


def forward(model: GPT, batch: Batch, step: tf.Tensor, training: bool) -> BatchSums:
    """Returns the loss sums of one microbatch.

    Args:
      model: a whole model.
      batch: tokens (b, S+1) and the rest of a batch.
      step: scalar integer.
      training: whether dropout is on.
    """
    tokens = batch["tokens"]
    context = make_context(batch, step, training)
    hidden = model.hidden_state(tokens[:, :-1], context)  # (b, S, D)
    return BatchSums(*model.head_loss(hidden, tokens[:, 1:], batch["loss_mask"], training))


def microbatch(batch: Batch, index: tf.Tensor | int, num_microbatches: int) -> dict[str, tf.Tensor]:
    """Returns microbatch number `index`: a contiguous part of the batch's rows."""
    size = batch["tokens"].shape[0] // num_microbatches
    part = {}
    for name, value in batch.items():
        rest = value.shape[1:]
        # A slice of constant size: XLA takes no other in a loop.
        part[name] = tf.slice(value, [index * size, *[0] * len(rest)], [size, *rest])
    return part


def batch_gradients(
    model: GPT,
    variables: Mapping[str, tf.Variable],
    batch: Batch,
    step: tf.Tensor,
    num_microbatches: int,
    wrap_tape: Callable[[tf.GradientTape], tf.GradientTape] = lambda tape: tape,
    loss_scale: tf.Tensor | None = None,
) -> tuple[Gradients, BatchSums]:
    """Returns the gradient of this process's summed loss, and the sums by row.

    Args:
      model: a whole model.
      variables: what to differentiate by, by canonical path.
      batch: this process's slice of a global batch.
      step: scalar integer.
      num_microbatches: forwards; more than one are accumulated in a loop, so that the graph and
        the memory are one microbatch's.
      wrap_tape: makes a reducing tape of a recording one; for one microbatch only.
      loss_scale: scalar float32 that multiplies the gradients; None means 1.
    """
    sources = list(variables.values())

    def one(part: Batch, wrap: Callable) -> tuple[list[tf.Tensor], BatchSums]:
        tape = tf.GradientTape()
        with tape:
            sums = forward(model, part, step, training=True)
        return wrap(tape).gradient(sums.loss_sum, sources, output_gradients=loss_scale), sums

    if num_microbatches == 1:
        gradients, sums = one(batch, wrap_tape)
        return dict(zip(variables, gradients, strict=True)), sums

    size = batch["tokens"].shape[0] // num_microbatches
    rows = tuple(
        tf.TensorArray(tf.float32, num_microbatches, element_shape=[size]) for _ in range(3)
    )
    # Sums over microbatches are exact whatever the weights are kept in.
    zeros = [tf.zeros(source.shape, tf.float32) for source in sources]

    def body(index, loss_sum, totals, rows):
        gradients, sums = one(microbatch(batch, index, num_microbatches), lambda tape: tape)
        totals = [
            total + tf.cast(gradient, total.dtype)
            for total, gradient in zip(totals, gradients, strict=True)
        ]
        rows = tuple(array.write(index, part) for array, part in zip(rows, sums[1:], strict=True))
        return index + 1, loss_sum + sums.loss_sum, totals, rows

    _, loss_sum, totals, rows = tf.while_loop(
        lambda index, *_: index < num_microbatches,
        body,
        (tf.constant(0), tf.constant(0.0), zeros, rows),
        parallel_iterations=1,
    )
    sums = BatchSums(loss_sum, *(array.concat() for array in rows))
    return dict(zip(variables, totals, strict=True)), sums
