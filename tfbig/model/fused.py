"""Element-wise passes over large tensors, made one pass by XLA.

TensorFlow runs each operation of a formula as a pass of its own; compiled, GELU takes a quarter of
the CPU time in float32 (benchmarks/activation.py). Only formulas are compiled, never a collective,
so that every strategy has them.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

SMALLEST = 1 << 16  # elements: below, a compiled call costs more than it saves


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of tensors that XLA compiles where the first one is large.

    Graphs of unknown shapes, which are saved for others, keep plain operations.

    Args:
      function: of tensors alone.
    """
    compiled = tf.function(function, autograph=False, jit_compile=True)

    def call(*tensors: tf.Tensor) -> Any:
        size = tensors[0].shape.num_elements()
        is_large = size is not None and size >= SMALLEST
        return compiled(*tensors) if is_large else function(*tensors)

    return call
