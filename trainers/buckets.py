"""Flat buckets: many gradients in few tensors, for collectives with few fixed names."""

from collections.abc import Mapping, Sequence

import tensorflow as tf


def flatten(tensors: Mapping[str, tf.Tensor], paths: Sequence[str]) -> tf.Tensor:
    """Returns one flat tensor (elements,) of the named tensors."""
    return tf.concat([tf.reshape(tensors[path], [-1]) for path in paths], 0)


def unflatten(
    flat: tf.Tensor, shapes: Mapping[str, tf.TensorShape], paths: Sequence[str]
) -> dict[str, tf.Tensor]:
    """Returns the tensors, by path, that `flatten` joined."""
    parts = tf.split(flat, [shapes[path].num_elements() for path in paths])
    return {path: tf.reshape(part, shapes[path]) for path, part in zip(paths, parts, strict=True)}
