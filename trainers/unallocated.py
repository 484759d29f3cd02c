"""A Keras model whose variables take no memory until they are given some."""

from collections.abc import Callable

import keras
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
