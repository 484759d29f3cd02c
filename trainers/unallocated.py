"""A Keras model whose variables take no memory until they are given some."""

from collections.abc import Callable

import keras
import tensorflow as tf
from keras.src.backend.common import global_state

from tfbig.model.gpt import GPT


def unallocated(make: Callable[[], GPT]) -> GPT:
    """Returns make(), whose variables have shapes and paths but no values.

    Args:
      make: builds a model without setting initial values.
    """
    with keras.StatelessScope(initialize_variables=False):
        model = make()
    # Keras notes such variables, and would initialise all of them at the end of another scope.
    names = {id(variable) for variable in model.variables}
    waiting = global_state.get_global_attribute("uninitialized_variables", [], set_to_default=True)
    waiting[:] = [variable for variable in waiting if id(variable) not in names]
    return model


def stored_as_used(
    make: Callable[[], GPT],
    value_of: Callable[[str], tf.Tensor],
    trains: Callable[[str], bool],
) -> GPT:
    """Returns make(), whose trained variables have the dtypes that the layers compute with.

    Args:
      make: builds a model without setting initial values.
      value_of: path -> float32 initial value.
      trains: path -> whether a run changes the variable and so keeps its exact value elsewhere;
        others stay float32.
    """
    model = unallocated(make)
    for path, variable in model.canonical_variables().items():
        value = value_of(path)
        if trains(path):
            value = tf.cast(value, model.weight_dtype(path))
        variable._initialize(tf.Variable(value, name=variable.name))
    return model
