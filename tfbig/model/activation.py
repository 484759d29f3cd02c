"""Nonlinearities of the feed-forward layer, whose backward pass needs their input alone.

TensorFlow's gradient of a formula keeps the result of each of its operations: seven tensors of the
layer's width for GELU's tanh form, about half of all that a block keeps for its backward pass. Here
the input is kept and the few element-wise operations are done again.
"""

import math
from collections.abc import Callable

import tensorflow as tf

from tfbig.model.fused import fused

_LINEAR = 2.0 * math.sqrt(2.0 / math.pi)  # of the tanh form (arXiv 1606.08415), in the sigmoid's
_CUBIC = 0.044715 * _LINEAR


def gelu_tanh(x: tf.Tensor) -> tf.Tensor:
    """Returns GELU in the tanh form that GPT-2 uses, of a tensor of any shape.

    Source: arXiv 1606.08415, section 2.
    """
    return _keeping_its_input(x, _tanh_form, _tanh_form_gradient)


def gelu(x: tf.Tensor) -> tf.Tensor:
    """Returns exact GELU, x times the normal distribution's integral up to x.

    Source: arXiv 1606.08415, section 2.
    """
    return _keeping_its_input(x, _exact_form, _exact_form_gradient)


def _wide(x: tf.Tensor) -> tf.Tensor:
    # float16 has no room for the square of 256, and infinity times zero is not a number; bfloat16
    # would be rounded after each operation, which takes longer than to compute.
    return tf.cast(x, tf.float32) if x.dtype.size < 4 else x


@fused
def _tanh_form(x: tf.Tensor) -> tf.Tensor:
    """Returns x times the sigmoid of 2 u, which is (1 + tanh(u)) / 2 in fewer operations."""
    wide = _wide(x)
    return tf.cast(wide * tf.sigmoid(wide * (_CUBIC * (wide * wide) + _LINEAR)), x.dtype)


@fused
def _tanh_form_gradient(x: tf.Tensor, upstream: tf.Tensor) -> tf.Tensor:
    wide, arriving = _wide(x), _wide(upstream)
    square = wide * wide
    gate = tf.sigmoid(wide * (_CUBIC * square + _LINEAR))
    inner = tf.raw_ops.SigmoidGrad(y=gate, dy=arriving * wide)
    return tf.cast(arriving * gate + inner * (3.0 * _CUBIC * square + _LINEAR), x.dtype)


def _integral(x: tf.Tensor) -> tf.Tensor:
    return 0.5 * (1.0 + tf.math.erf(x * math.sqrt(0.5)))


@fused
def _exact_form(x: tf.Tensor) -> tf.Tensor:
    wide = _wide(x)
    return tf.cast(wide * _integral(wide), x.dtype)


@fused
def _exact_form_gradient(x: tf.Tensor, upstream: tf.Tensor) -> tf.Tensor:
    wide, arriving = _wide(x), _wide(upstream)
    density = math.sqrt(0.5 / math.pi) * tf.exp(-0.5 * wide * wide)
    return tf.cast(arriving * (_integral(wide) + wide * density), x.dtype)


def _keeping_its_input(
    x: tf.Tensor,
    value: Callable[[tf.Tensor], tf.Tensor],
    gradient_of: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
) -> tf.Tensor:
    """Returns value(x), whose gradient is gradient_of(x, upstream)."""

    @tf.custom_gradient
    def apply(x: tf.Tensor):
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            # Without this wait part of it could be made, and kept, during the forward pass.
            with tf.control_dependencies([upstream]):
                late = tf.identity(x)
            return gradient_of(late, upstream)

        return value(x), gradient

    return apply(x)
