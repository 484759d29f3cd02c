"""Dropout whose mask depends on what is dropped, not on which device holds it."""

import tensorflow as tf

_GOLDEN = 0x9E3779B9  # 2^32 / golden ratio: spreads consecutive indices


def _stir(x: tf.Tensor) -> tf.Tensor:
    """Returns uint32 whose upper half is a hash of each uint32 element.

    Source: the "lowbias32" constants found by search by C. Wellons (hash-prospector, 2018).
    """
    x = tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, tf.constant(16, tf.uint32)))
    x *= tf.constant(0x7FEB352D, tf.uint32)
    x = tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, tf.constant(15, tf.uint32)))
    return x * tf.constant(0x846CA68B, tf.uint32)


def _mix(x: tf.Tensor) -> tf.Tensor:
    """Returns a 32-bit hash of each uint32 element."""
    x = _stir(x)
    return tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, tf.constant(16, tf.uint32)))


def sample_keys(
    seed: int, step: tf.Tensor, layer: int, site: int, sample_index: tf.Tensor
) -> tf.Tensor:
    """Returns one hash key a sample.

    Args:
      seed: the run's seed.
      step: scalar integer, the optimizer step.
      layer: global block index; -1 for the embedding.
      site: which dropout of the block.
      sample_index: (B,) int64, positions of the samples in the run's stream.

    Returns:
      (B,) uint32.
    """
    key = _mix(tf.constant((seed * 0x85EBCA6B + 0xC2B2AE35) % (1 << 32), tf.uint32))
    for part in (tf.cast(step, tf.uint32), tf.constant((layer + 1) * 16 + site, tf.uint32)):
        key = _mix(key * tf.constant(_GOLDEN, tf.uint32) + part)
    low = tf.cast(tf.bitwise.bitwise_and(sample_index, 0xFFFFFFFF), tf.uint32)
    high = tf.cast(tf.bitwise.right_shift(sample_index, tf.constant(32, tf.int64)), tf.uint32)
    keys = _mix(key + low * tf.constant(_GOLDEN, tf.uint32))
    return _mix(keys ^ (high * tf.constant(_GOLDEN, tf.uint32)))


def keep_mask(keys: tf.Tensor, element_index: tf.Tensor, rate: float) -> tf.Tensor:
    """Returns which elements survive.

    Args:
      keys: (B,) uint32, from `sample_keys`.
      element_index: uint32, position of each element in its sample's full tensor.
      rate: probability of being dropped, in [0, 1).

    Returns:
      bool, (B, *element_index.shape).
    """
    keys = tf.reshape(keys, [-1] + [1] * element_index.shape.rank)  # (B, 1, ...)
    # Indices are mixed once for all samples, and only the sum with a sample's key at full size:
    # masks of two keys then differ as two stretches of one hash's outputs do. The comparison looks
    # at the upper bits, so the last step of the hash, which only stirs lower ones, is left out.
    bits = _stir(_mix(element_index)[tf.newaxis] + keys)
    # A signed comparison: kernels for it exist on every device.
    threshold = int(rate * (1 << 32)) - (1 << 31)
    return tf.bitcast(bits, tf.int32) >= tf.constant(threshold, tf.int32)


def dropout(x: tf.Tensor, keys: tf.Tensor, rate: float, first_position: int = 0) -> tf.Tensor:
    """Drops elements of a (B, T, D) tensor and scales the rest by 1/(1 - rate).

    Args:
      x: (B, T, D), whole in its last dim.
      keys: (B,) uint32, from `sample_keys`.
      rate: probability of being dropped.
      first_position: where x's positions begin in the full tensor.
    """
    length, width = x.shape[1], x.shape[2]
    first = first_position * width
    index = tf.reshape(tf.range(first, first + length * width), [length, width])  # (T, D)
    return drop(x, keep_mask(keys, tf.cast(index, tf.uint32), rate), rate)


def drop(x: tf.Tensor, mask: tf.Tensor, rate: float) -> tf.Tensor:
    """Returns x where the mask is set, scaled by 1/(1 - rate), and 0 elsewhere.

    With a gradient of its own: TF's, of a choice between x and one zero, also sums that of the
    zero over all elements.

    Args:
      x: any shape.
      mask: bool, of x's shape.
      rate: share of elements that are dropped.
    """
    scale = 1.0 / (1.0 - rate)

    def chosen(value: tf.Tensor) -> tf.Tensor:
        return tf.where(mask, value * tf.cast(scale, value.dtype), tf.zeros((), value.dtype))

    @tf.custom_gradient
    def run(x: tf.Tensor):
        return chosen(x), chosen

    return run(x)
