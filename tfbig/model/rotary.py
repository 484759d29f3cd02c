"""Rotary position embedding: queries and keys are turned by an angle that grows with position."""

import tensorflow as tf


def rotary(x: tf.Tensor, position: tf.Tensor, rotary_dim: int, base: float = 10_000.0) -> tf.Tensor:
    """Returns x with the first `rotary_dim` dims of each head turned by their position.

    Dim i is paired with dim i + rotary_dim / 2, as GPT-NeoX pairs them; the angle of pair i is
    position x base^(-2i / rotary_dim), computed in float32.

    Args:
      x: (B, T, H, head_dim).
      position: (T,) or (B, T) int32.
      rotary_dim: even, at most head_dim; the other dims stay as they are.
      base: of the angles.

    Source: RoFormer (arXiv 2104.09864, section 3.2.2); partial as in GPT-NeoX-20B
      (arXiv 2204.06745, section 2.1.1).
    """
    half = rotary_dim // 2
    frequency = base ** (-tf.range(half, dtype=tf.float32) / half)  # (half,)
    angle = tf.cast(position, tf.float32)[..., tf.newaxis] * frequency  # (T, half) or (B, T, half)
    angle = angle[..., tf.newaxis, :]  # (..., T, 1, half)
    cos, sin = tf.cos(angle), tf.sin(angle)
    first, second, rest = tf.split(x, [half, half, x.shape[-1] - rotary_dim], axis=-1)
    first, second = tf.cast(first, tf.float32), tf.cast(second, tf.float32)  # (B, T, H, half)
    turned = tf.concat([first * cos - second * sin, second * cos + first * sin], -1)
    return tf.concat([tf.cast(turned, x.dtype), rest], -1)  # (B, T, H, head_dim)
