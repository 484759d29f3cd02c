"""Layer norm whose backward pass reads one tensor of the forward pass, the normalised input.

TensorFlow's gradient of Keras' formula keeps two and passes over them more often
(benchmarks/activation.py). Compiled by XLA it takes as long, and a second to compile.
"""

import keras
import tensorflow as tf


class LayerNorm(keras.layers.LayerNormalization):
    """Keras' layer norm over the last dim, computed in float32, in float64 for float64."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        """Returns x (..., D), normalised over D, times gamma plus beta."""
        gamma, beta = tf.convert_to_tensor(self.gamma), tf.convert_to_tensor(self.beta)
        return tf.cast(layer_norm(x, gamma, beta, self.epsilon), self.compute_dtype)


def _forward(x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, epsilon: tf.Tensor):
    """Returns (layer norm, normalised input (..., D), its scale (..., 1))."""
    wide = tf.cast(x, gamma.dtype)
    centered = wide - tf.reduce_mean(wide, axis=-1, keepdims=True)
    variance = tf.reduce_mean(tf.square(centered), axis=-1, keepdims=True)
    scale = tf.math.rsqrt(variance + epsilon)  # (..., 1)
    normalised = centered * scale
    return tf.cast(normalised * gamma + beta, x.dtype), normalised, scale


def _backward(upstream: tf.Tensor, normalised: tf.Tensor, scale: tf.Tensor, gamma: tf.Tensor):
    """Returns the gradients of x, gamma and beta."""
    arriving = tf.cast(upstream, gamma.dtype)
    outer = list(range(normalised.shape.rank - 1))
    product = arriving * normalised
    own = arriving * gamma  # gradient of what is normalised
    along = tf.reduce_mean(product * gamma, axis=-1, keepdims=True)
    inner = own - tf.reduce_mean(own, axis=-1, keepdims=True) - normalised * along
    return (
        tf.cast(inner * scale, upstream.dtype),
        tf.reduce_sum(product, outer),  # (D,)
        tf.reduce_sum(arriving, outer),  # (D,)
    )


@tf.custom_gradient
def _layer_norm(x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, epsilon: tf.Tensor):
    y, normalised, scale = _forward(x, gamma, beta, epsilon)

    def gradient(upstream: tf.Tensor):
        return *_backward(upstream, normalised, scale, gamma), None

    return y, gradient


def layer_norm(x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, epsilon: float) -> tf.Tensor:
    """Returns layer norm (arXiv 1607.06450) over the last dim, in x's dtype.

    Args:
      x: (..., D), any float dtype.
      gamma: (D,), in the dtype that is computed in.
      beta: as gamma.
      epsilon: added to the variance.
    """
    return _layer_norm(x, gamma, beta, tf.constant(epsilon, gamma.dtype))
