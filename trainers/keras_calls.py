"""Calls that scripts of Keras 2 make of an optimizer, which Keras 3 has no more."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


class Variables(list):
    """An optimizer's variables: the list that Keras 3 has, which Keras 2's call also returns."""

    def __call__(self) -> "Variables":
        return self


def get_gradients(
    optimizer: keras.optimizers.Optimizer, loss: tf.Tensor, params: Sequence[Any]
) -> list[tf.Tensor | None]:
    """Returns the gradients of a loss, as Keras 2's optimizers did inside a graph.

    Args:
      optimizer: whose method this is; it clips afterwards, as it does with any gradients.
      loss: scalar of the graph under construction.
      params: variables.
    """
    sources = [getattr(variable, "value", variable) for variable in params]
    return tf.gradients(loss, sources)


def restore_lost_calls() -> None:
    """Gives Keras' optimizers `variables()` and `get_gradients` back; `variables` stays a list."""
    base = keras.optimizers.Optimizer
    if hasattr(base, "get_gradients"):
        return
    plain = base.variables
    base.variables = property(lambda optimizer: Variables(plain.fget(optimizer)))
    base.get_gradients = get_gradients
