"""Initial values from (seed, canonical path) alone, any slice without the rest."""

import hashlib
import math
from collections.abc import Mapping

import keras
import tensorflow as tf

from tfbig.config import ModelConfig
from tfbig.model.tensor_split import WHOLE, TensorSplit
from tfbig.variables import variable_rule, variable_specs

_PHILOX = 1  # algorithm id of StatelessRandomNormalV2
_VALUES_PER_COUNTER = 4  # Philox-4x32 makes four 32-bit words a counter step


def _key(seed: int, path: str) -> int:
    """Returns the 64-bit Philox key of a variable."""
    digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def normal_slice(
    seed: int, path: str, shape: tuple[int, ...], dim: int, start: int, size: int, std: float
) -> tf.Tensor:
    """Returns a slice along `dim` of the variable's full normal initial value.

    The full value is generated with `dim` first, one run of counters for each index along it, so
    that a slice is generated alone and equals that of the whole bit for bit. Must run outside
    jit: XLA makes other numbers from the same key and counter.

    Args:
      seed: the run's seed.
      path: canonical path, which keys the stream.
      shape: shape of the full variable.
      dim: the dim that is sliced.
      start: first index along `dim`.
      size: number of indices.
      std: standard deviation.
    """
    others = [length for index, length in enumerate(shape) if index != dim]
    row_length = math.prod(others)
    counters_per_row = -(-row_length // _VALUES_PER_COUNTER)
    flat = tf.raw_ops.StatelessRandomNormalV2(
        shape=[size, counters_per_row * _VALUES_PER_COUNTER],
        key=tf.constant([_key(seed, path)], tf.uint64),
        counter=tf.constant([start * counters_per_row, 0], tf.uint64),
        alg=_PHILOX,
    )
    value = tf.reshape(flat[:, :row_length], [size, *others])  # (dim, others ...)
    order = [*range(1, dim + 1), 0, *range(dim + 1, len(shape))]
    return tf.transpose(value, order) * std  # the variable's own order of dims


def initial_value(
    config: ModelConfig, seed: int, path: str, shape: tuple[int, ...], start: int = 0, size: int = 0
) -> tf.Tensor:
    """Returns the initial value of a variable, or of its slice along the sharded dim.

    Args:
      config: the model.
      seed: the run's seed.
      path: canonical path.
      shape: shape of the full variable.
      start: first index along the sharded dim.
      size: number of indices along it; 0 means all.

    Source: GPT-2 (Radford et al. 2019, section 2.3): N(0, 0.02), projections into the residual
    stream scaled by 1/sqrt(number of residual sums), which is 2 a block.
    """
    rule = variable_rule(path)
    dim = rule.shard_dim or 0
    size = size or shape[dim]
    if rule.initial_value in ("zeros", "ones"):
        sliced = (*shape[:dim], size, *shape[dim + 1 :])
        return tf.zeros(sliced) if rule.initial_value == "zeros" else tf.ones(sliced)
    std = config.init_std
    if rule.initial_value == "residual" and config.residual_init_std:
        std = config.residual_init_std
    elif rule.initial_value == "residual" and config.scale_residual_init:
        std /= math.sqrt(2 * config.num_layers)
    return normal_slice(seed, path, shape, dim, start, size, std)


def initialize(
    config: ModelConfig,
    seed: int,
    variables: Mapping[str, keras.Variable],
    split: TensorSplit = WHOLE,
) -> None:
    """Sets variables to their initial values, one at a time.

    Args:
      config: the model.
      seed: the run's seed.
      variables: by canonical path.
      split: which part of each sharded variable is here; rows of padding become zero.
    """
    for path, variable in variables.items():
        variable.assign(part_value(config, seed, path, split))


def part_value(config: ModelConfig, seed: int, path: str, split: TensorSplit = WHOLE) -> tf.Tensor:
    """Returns the initial value of what is here of a variable; rows of padding are zero.

    Args:
      config: the model.
      seed: the run's seed.
      path: canonical path.
      split: which part of each sharded variable is here.
    """
    shape = next(spec.shape for spec in variable_specs(config) if spec.path == path)
    dim = variable_rule(path).shard_dim
    if dim is None or split.size == 1:
        return initial_value(config, seed, path, shape)
    start, size = split.valid_part(shape[dim])
    own = split.part(shape[dim])[1]
    if size == 0:
        return tf.zeros([*shape[:dim], own, *shape[dim + 1 :]])
    value = initial_value(config, seed, path, shape, start, size)
    pads = [[0, own - size if index == dim else 0] for index in range(len(shape))]
    return tf.pad(value, pads) if own > size else value
