"""Nonlinearities of the feed-forward layer, whose backward pass needs their input alone.

TensorFlow's gradient of a formula keeps the result of each of its operations: seven tensors of the
layer's width for GELU's tanh form, about half of all that a block keeps for its backward pass. Here
the input is kept and the few element-wise operations are done again.
"""

import math
from collections.abc import Callable

import tensorflow as tf

_CUBIC = 0.044715  # of the tanh form (arXiv 1606.08415)
_SCALE = math.sqrt(2.0 / math.pi)


def gelu_tanh(x: tf.Tensor) -> tf.Tensor:
    """Returns GELU in the tanh form that GPT-2 uses, of a tensor of any shape.

    Source: arXiv 1606.08415, section 2.
    """

    def value(x: tf.Tensor) -> tf.Tensor:
        return 0.5 * x * (1.0 + tf.tanh(_SCALE * x * (1.0 + _CUBIC * x * x)))

    def slope(x: tf.Tensor) -> tf.Tensor:
        square = x * x
        tanh = tf.tanh(_SCALE * x * (1.0 + _CUBIC * square))
        inner = _SCALE * (1.0 + 3.0 * _CUBIC * square)
        return 0.5 * (1.0 + tanh + x * (1.0 - tanh * tanh) * inner)

    return _keeping_its_input(x, value, slope)


def gelu(x: tf.Tensor) -> tf.Tensor:
    """Returns exact GELU, x times the normal distribution's integral up to x.

    Source: arXiv 1606.08415, section 2.
    """

    def integral(x: tf.Tensor) -> tf.Tensor:
        return 0.5 * (1.0 + tf.math.erf(x * math.sqrt(0.5)))

    def slope(x: tf.Tensor) -> tf.Tensor:
        density = math.sqrt(0.5 / math.pi) * tf.exp(-0.5 * x * x)
        return integral(x) + x * density

    return _keeping_its_input(x, lambda x: x * integral(x), slope)


def _keeping_its_input(
    x: tf.Tensor,
    value: Callable[[tf.Tensor], tf.Tensor],
    slope: Callable[[tf.Tensor], tf.Tensor],
) -> tf.Tensor:
    """Returns value(x), whose gradient is slope(x) times what comes."""

    def wide(x: tf.Tensor) -> tf.Tensor:
        # float16 has no room for the square of 256, and infinity times zero is not a number.
        return tf.cast(x, tf.float32) if x.dtype == tf.float16 else x

    @tf.custom_gradient
    def apply(x: tf.Tensor):
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            # Without this wait the slope could be made, and kept, during the forward pass.
            with tf.control_dependencies([upstream]):
                late = tf.identity(x)
            return tf.cast(slope(wide(late)) * wide(upstream), x.dtype)

        return tf.cast(value(wide(x)), x.dtype), gradient

    return apply(x)
