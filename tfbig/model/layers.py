"""Layers under the blocks: embedding table and projection."""

import math
from collections.abc import Callable

import keras
import tensorflow as tf

from tfbig.model.layer_norm import LayerNorm


@tf.custom_gradient
def lookup(table: tf.Tensor, ids: tf.Tensor):
    """Returns rows of a table, with a dense gradient.

    TF's own gradient is IndexedSlices: Adam would square it before summing repeated tokens, and
    Horovod would gather it from all ranks.

    Args:
      table: (V, D).
      ids: integer, any shape.

    Returns:
      (*ids.shape, D).
    """

    def gradient(upstream: tf.Tensor):
        rows = tf.reshape(upstream, [-1, table.shape[1]])  # (tokens, D)
        return tf.math.unsorted_segment_sum(rows, tf.reshape(ids, [-1]), table.shape[0]), None

    return tf.gather(table, ids), gradient


class Embedding(keras.layers.Layer):
    """A table of vectors, kept in float32 whatever the compute dtype.

    Args:
      num_rows: entries of the table.
      dim: width of one vector.
    """

    def __init__(self, num_rows: int, dim: int, **kwargs) -> None:
        super().__init__(**kwargs)
        self.num_rows, self.dim = num_rows, dim
        self.embeddings = self.add_weight(
            shape=(num_rows, dim), initializer="zeros", name="embeddings", autocast=False
        )
        self.built = True

    def call(self, ids: tf.Tensor) -> tf.Tensor:
        return tf.cast(lookup(tf.convert_to_tensor(self.embeddings), ids), self.compute_dtype)

    def table(self) -> tf.Tensor:
        """Returns the table (V, D) in the compute dtype, for a tied head."""
        return tf.cast(tf.convert_to_tensor(self.embeddings), self.compute_dtype)

    def products(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the products (B, V) of a few vectors (B, D) with all entries.

        The table is the left factor: with so few columns that is several times as fast as reading
        the table transposed.
        """
        return tf.transpose(tf.matmul(self.table(), x, transpose_b=True))

    def get_config(self) -> dict:
        return {**super().get_config(), "num_rows": self.num_rows, "dim": self.dim}


class Projection(keras.layers.Layer):
    """A matrix product over the last input dims, as one MatMul whatever the kernel's shape.

    Args:
      input_shape: dims that are summed over, e.g. (D,) or (H, head_dim).
      output_shape: dims that take their place, e.g. (3, H, head_dim) or (D,).
      use_bias: whether a bias of the output's shape is added.
      lora_rank: rank of an adapter beside the kernel; 0 means none.
      lora_alpha: its product is multiplied by lora_alpha / lora_rank.

    Source of the adapter: LoRA (arXiv 2106.09685, section 4.1).
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        output_shape: tuple[int, ...],
        use_bias: bool = True,
        *,
        lora_rank: int = 0,
        lora_alpha: float = 16.0,
        **kwargs,
    ) -> None:
        super().__init__(**kwargs)
        self.lora_rank, self.lora_alpha = lora_rank, lora_alpha
        self.summed, self.made, self.use_bias = tuple(input_shape), tuple(output_shape), use_bias
        self.kernel = self.add_weight(
            shape=(*self.summed, *self.made), initializer="zeros", name="kernel"
        )
        self.bias = (
            self.add_weight(shape=self.made, initializer="zeros", name="bias") if use_bias else None
        )
        if lora_rank:
            self.lora_a = self.add_weight(
                shape=(*self.summed, lora_rank), initializer="zeros", name="lora_a"
            )
            self.lora_b = self.add_weight(
                shape=(lora_rank, *self.made), initializer="zeros", name="lora_b"
            )
        self.built = True

    def call(
        self, x: tf.Tensor, leave: Callable[[tf.Tensor], tf.Tensor] | None = None
    ) -> tf.Tensor:
        """Returns (B, T, *output_shape).

        Args:
          x: (B, T, *input_shape).
          leave: sums the products of a kernel whose input dims are shared, before the bias.
        """
        num_in, num_out = math.prod(self.summed), math.prod(self.made)
        kernel = tf.reshape(tf.convert_to_tensor(self.kernel), [num_in, num_out])
        leading = tf.shape(x)[: x.shape.rank - len(self.summed)]  # (B, T)
        flat = tf.reshape(x, [-1, num_in])  # (B*T, in)
        x = tf.matmul(flat, kernel)  # (B*T, out)
        if self.lora_rank:
            x += self._adapted(flat, num_in, num_out)
        if leave is not None:
            x = leave(tf.reshape(x, tf.concat([leading, [num_out]], 0)))  # (B, T, out)
            leading = tf.shape(x)[:2]
        if self.bias is not None:
            x = tf.nn.bias_add(x, tf.reshape(tf.convert_to_tensor(self.bias), [num_out]))
        return tf.reshape(x, tf.concat([leading, self.made], 0))  # (B, T, *output_shape)

    def _adapted(self, flat: tf.Tensor, num_in: int, num_out: int) -> tf.Tensor:
        """Returns the adapter's share (B*T, out); where kernels are shared, of this part's inputs.

        Both products are linear, so that shares are summed with the kernel's own.
        """
        down = tf.reshape(tf.convert_to_tensor(self.lora_a), [num_in, self.lora_rank])
        up = tf.reshape(tf.convert_to_tensor(self.lora_b), [self.lora_rank, num_out])
        scale = tf.cast(self.lora_alpha / self.lora_rank, flat.dtype)
        return tf.matmul(tf.matmul(flat, down), up) * scale

    def get_config(self) -> dict:
        return {
            **super().get_config(),
            "lora_rank": self.lora_rank,
            "lora_alpha": self.lora_alpha,
            "input_shape": self.summed,
            "output_shape": self.made,
            "use_bias": self.use_bias,
        }


def make_norm(dim: int, epsilon: float, name: str, dtype: keras.DTypePolicy) -> LayerNorm:
    """Returns a built layer norm over the last dim; it computes in float32 by itself."""
    norm = LayerNorm(epsilon=epsilon, name=name, dtype=dtype)
    norm.build((None, None, dim))
    return norm
