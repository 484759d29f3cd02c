"""Attention, feed-forward layer and the block that joins them. Single-device code.

B = batch, T = time, D = width, H = heads, d = head_dim.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfbig.model.activation import gelu, gelu_tanh
from tfbig.model.attention_form import AttentionForm
from tfbig.model.context import Context
from tfbig.model.dropout import dropout, sample_keys
from tfbig.model.layers import Projection, make_norm
from tfbig.model.rotary import rotary
from tfbig.model.tensor_split import WHOLE, TensorSplit

SITE_ATTENTION, SITE_RESIDUAL1, SITE_RESIDUAL2, SITE_EMBEDDING = range(4)


class CausalSelfAttention(keras.layers.Layer):
    """Multi-head attention under a causal mask, with one fused projection to q, k and v.

    Args:
      embed_dim: width D.
      num_heads: heads H.
      head_dim: width d of one head.
      rate: dropout rate of the attention weights.
      rotary_dim: dims of each head that are turned by their position; 0 means none.
      rotary_base: of the rotary angles.
      split: which of the heads are here.
      path: name of its collectives.
      form: how it attends; None means the plain form at every length.
      lora: arguments of the projections' adapters.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        head_dim: int,
        rate: float = 0.0,
        *,
        rotary_dim: int = 0,
        rotary_base: float = 10_000.0,
        split: TensorSplit = WHOLE,
        path: str = "",
        form: AttentionForm | None = None,
        lora: Mapping[str, Any] | None = None,
        **kwargs,
    ) -> None:
        super().__init__(**kwargs)
        self.rate, self.split, self.path_name = rate, split, path
        self.rotary_dim, self.rotary_base = rotary_dim, rotary_base
        first_head, num_heads = split.part(num_heads)
        self.form = form or AttentionForm("plain", rate, first_head)
        dtype = self.dtype_policy
        with keras.name_scope(self.name):
            made = (3, num_heads, head_dim)
            self.qkv = Projection((embed_dim,), made, name="qkv", dtype=dtype, **(lora or {}))
            self.out = Projection(made[1:], (embed_dim,), name="out", dtype=dtype, **(lora or {}))
        self.built = True

    def call(
        self,
        x: tf.Tensor,
        document_ids: tf.Tensor | None = None,
        dropout_keys: tf.Tensor | None = None,
        position: tf.Tensor | None = None,
        attend: Callable[..., tf.Tensor] | None = None,
    ) -> tf.Tensor:
        """Returns (B, T, D).

        Args:
          x: (B, T, D).
          document_ids: (B, T) int32 or None.
          dropout_keys: (B,) uint32, or None for no dropout.
          position: (T,) or (B, T) int32, for rotary embedding.
          attend: takes query, key and value (B, T, H, d) instead, over a decode cache.
        """
        x = self.split.enter(x, self.path_name)  # (B, T, D)
        query, key, value = tf.unstack(self.qkv(x), axis=2)  # 3 x (B, T, H, d)
        if self.rotary_dim:
            query, key = (
                rotary(part, position, self.rotary_dim, self.rotary_base) for part in (query, key)
            )
        if attend is not None:
            attended = attend(query, key, value)
        else:
            attended = self.form(query, key, value, document_ids, dropout_keys)
        return self.out(attended, leave=leave_of(self.split, self.path_name))  # (B, T, D)


def leave_of(split: TensorSplit, name: str) -> Callable[[tf.Tensor], tf.Tensor] | None:
    """Returns how a sublayer's products are summed; None where they are whole."""
    return None if split.size == 1 else functools.partial(split.leave, name=name)


ACTIVATIONS = {"relu": tf.nn.relu, "gelu": gelu, "gelu_tanh": gelu_tanh}


class FeedForward(keras.layers.Layer):
    """Two projections with a nonlinearity between them.

    Args:
      embed_dim: width D.
      ff_dim: width between the projections.
      activation: "relu", "gelu" (arXiv 1606.08415) or "gelu_tanh", the form that GPT-2 uses.
      split: which part of the width between the projections is here.
      path: name of its collectives.
      lora: arguments of the projections' adapters.
    """

    def __init__(
        self,
        embed_dim: int,
        ff_dim: int,
        activation: str,
        *,
        split: TensorSplit = WHOLE,
        path: str = "",
        lora: Mapping[str, Any] | None = None,
        **kwargs,
    ) -> None:
        super().__init__(**kwargs)
        self.activation, self.split, self.path_name = activation, split, path
        self.look: Callable[[tf.Tensor], None] | None = None  # at what the nonlinearity gets
        _, ff_dim = split.part(ff_dim)
        dtype = self.dtype_policy
        with keras.name_scope(self.name):
            self.up = Projection((embed_dim,), (ff_dim,), name="up", dtype=dtype, **(lora or {}))
            self.down = Projection(
                (ff_dim,), (embed_dim,), name="down", dtype=dtype, **(lora or {})
            )
        self.built = True

    def call(self, x: tf.Tensor) -> tf.Tensor:
        hidden = self.up(self.split.enter(x, self.path_name))  # (B, T, F)
        if self.look is not None:
            self.look(hidden)
        hidden = ACTIVATIONS[self.activation](hidden)
        return self.down(hidden, leave=leave_of(self.split, self.path_name))  # (B, T, D)


class TransformerBlock(keras.layers.Layer):
    """Attention and feed-forward layer, each behind a residual sum.

    The first four arguments are the original's, in its order, and without others the block is the
    original's: post-norm, ReLU, heads as wide as the model.

    Args:
      embed_dim: width D.
      num_heads: heads H.
      ff_dim: width of the feed-forward layer.
      rate: residual dropout rate.
      head_dim: width of one head; None means embed_dim, as the original's key_dim.
      norm_order: "post" or "pre".
      norm_epsilon: added to the variance in layer norm.
      activation: of the feed-forward layer.
      parallel_residual: both sublayers read the block's input (GPT-NeoX, arXiv 2204.06745).
      rotary_dim: dims of each head that are turned by their position; 0 means none.
      rotary_base: of the rotary angles.
      attention_rate: dropout rate of the attention weights.
      index: global index of the block, which keys its dropout.
      seed: the run's seed, which keys its dropout.
      split: which part of the block's width is here.
      form: how all blocks of a model attend; None means the plain form.
      lora_rank: rank of an adapter beside each projection; 0 means none.
      lora_alpha: its product is multiplied by lora_alpha / lora_rank.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        ff_dim: int,
        rate: float = 0.1,
        *,
        head_dim: int | None = None,
        norm_order: str = "post",
        norm_epsilon: float = 1e-6,
        activation: str = "relu",
        parallel_residual: bool = False,
        rotary_dim: int = 0,
        rotary_base: float = 10_000.0,
        attention_rate: float = 0.0,
        index: int = 0,
        seed: int = 0,
        split: TensorSplit = WHOLE,
        form: AttentionForm | None = None,
        lora_rank: int = 0,
        lora_alpha: float = 16.0,
        **kwargs,
    ) -> None:
        super().__init__(**kwargs)
        lora = {"lora_rank": lora_rank, "lora_alpha": lora_alpha}
        self.rate, self.norm_order, self.index, self.seed = rate, norm_order, index, seed
        self.split, self.parallel_residual = split, parallel_residual
        dtype = self.dtype_policy
        with keras.name_scope(self.name):
            self.att = CausalSelfAttention(
                embed_dim,
                num_heads,
                head_dim or embed_dim,
                attention_rate,
                rotary_dim=rotary_dim,
                rotary_base=rotary_base,
                split=split,
                path=f"block_{index}.att",
                form=form,
                lora=lora,
                name="att",
                dtype=dtype,
            )
            self.ffn = FeedForward(
                embed_dim,
                ff_dim,
                activation,
                split=split,
                path=f"block_{index}.ffn",
                lora=lora,
                name="ffn",
                dtype=dtype,
            )
            self.layernorm1 = make_norm(embed_dim, norm_epsilon, "layernorm1", dtype)
            self.layernorm2 = make_norm(embed_dim, norm_epsilon, "layernorm2", dtype)
        self.built = True

    def call(self, hidden: tf.Tensor, context: Context) -> tf.Tensor:
        """Returns the block's output (B, T, D)."""
        if self.parallel_residual:
            attended = self._attend(self.layernorm1(hidden), context)
            return hidden + attended + self._feed_forward(self.layernorm2(hidden), context)
        if self.norm_order == "pre":
            hidden += self._attend(self.layernorm1(hidden), context)
            return hidden + self._feed_forward(self.layernorm2(hidden), context)
        hidden = self.layernorm1(hidden + self._attend(hidden, context))
        return self.layernorm2(hidden + self._feed_forward(hidden, context))

    def _attend(self, x: tf.Tensor, context: Context) -> tf.Tensor:
        keys = self._keys(SITE_ATTENTION, self.att.rate, context)
        cache = context.cache
        attended = self.att(
            x,
            document_ids=context.document_ids,
            dropout_keys=keys,
            position=context.position,
            attend=None if cache is None else functools.partial(cache.attend, self.index),
        )
        return self._drop(attended, SITE_RESIDUAL1, context)

    def _feed_forward(self, x: tf.Tensor, context: Context) -> tf.Tensor:
        return self._drop(self.ffn(x), SITE_RESIDUAL2, context)

    def _keys(self, site: int, rate: float, context: Context) -> tf.Tensor | None:
        if not context.training or rate == 0.0:
            return None
        return sample_keys(self.seed, context.step, self.index, site, context.sample_index)

    def _drop(self, x: tf.Tensor, site: int, context: Context) -> tf.Tensor:
        keys = self._keys(site, self.rate, context)
        if keys is None:
            return x
        return dropout(x, keys, self.rate, self.split.first_position(x.shape[1]))
