"""Activation checkpointing: forward keeps a part's inputs, backward makes the rest again.

Source: Chen et al., Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174).
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfbig.model.host_store import HostStore
from tfbig.recomputation_mode import group_size


def recomputed(
    function: Callable[..., tf.Tensor],
    *arguments: tf.Tensor,
    store: HostStore | None = None,
    index: int = 0,
) -> tf.Tensor:
    """Returns function(*arguments), of which backward keeps the arguments alone.

    Args:
      function: is called once more in the backward pass; what it reads besides its arguments has
        no gradient.
      arguments: tensors it is differentiated by.
      store: where the first argument waits meanwhile; None leaves it where it is.
      index: under which it waits there.
    """

    @tf.custom_gradient
    def run(*arguments: tf.Tensor):
        if store is not None:
            store.put(index, arguments[0])

        def gradient(upstream: tf.Tensor):
            kept = arguments
            if store is not None:
                kept = (store.get(index, upstream), *arguments[1:])
            again = _after(upstream, kept)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(again)
                result = function(*again)
            return tape.gradient(result, again, output_gradients=upstream)

        return function(*arguments), gradient

    return run(*arguments)


def _after(upstream: tf.Tensor, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the tensors, which are not there before `upstream` is.

    Without that the second forward pass would be the first one's twin, and merged with it or run
    at once.
    """
    with tf.control_dependencies([upstream]):
        return [tf.identity(tensor) for tensor in tensors]


def run_blocks(
    blocks: Sequence[keras.layers.Layer],
    hidden: tf.Tensor,
    context: Any,
    mode: str,
    offload_horizon: int | None = None,
) -> tf.Tensor:
    """Returns the last block's output (B, T, D).

    Args:
      blocks: in order.
      hidden: (B, T, D), what enters the first.
      context: of the microbatch.
      mode: of activation checkpointing; without training nothing is made twice.
      offload_horizon: has the inputs of groups wait in host memory, see HostStore; None doesn't.
    """
    size = group_size(mode) if context.training else 0
    if size == 0:
        for block in blocks:
            hidden = block(hidden, context=context)
        return hidden
    store = None if offload_horizon is None else HostStore(offload_horizon)
    for index, first in enumerate(range(0, len(blocks), size)):
        group = blocks[first : first + size]
        hidden = _recomputed_group(group, hidden, context, store, index)
    return hidden


def _recomputed_group(
    blocks: Sequence[keras.layers.Layer],
    hidden: tf.Tensor,
    context: Any,
    store: HostStore | None,
    index: int,
) -> tf.Tensor:
    variables = [variable for block in blocks for variable in block.trainable_variables]

    def run(hidden: tf.Tensor, *weights: tf.Tensor) -> tf.Tensor:
        scope = keras.StatelessScope()
        for variable, weight in zip(variables, weights, strict=True):
            scope.add_update((variable, weight))  # the constructor's mapping would cast to float32
        with scope:
            for block in blocks:
                hidden = block(hidden, context=context)
        return hidden

    # As arguments, the weights have gradients whether they are variables or a strategy's tensors.
    weights = [tf.convert_to_tensor(variable) for variable in variables]
    return recomputed(run, hidden, *weights, store=store, index=index)
