"""The forms of causal attention a model can take: --attention's values, as one callable.

What is fused already, looked up for TensorFlow 2.21 and Keras 3.15: nothing that a model on the
TensorFlow backend could call. `keras.ops.dot_product_attention(flash_attention=True)` raises there,
and without it is the plain form; TensorFlow has no attention operation. XLA for GPUs keeps cuDNN's
fused attention behind custom calls that JAX makes; the passes that found attention in a graph of
TensorFlow's were removed (github.com/openxla/xla/pull/22225; issues/23389 says why). What is left
is to have XLA fuse what stands between the matrix products, which is what the forms "_xla" do.
"""

import tensorflow as tf

from tfbig.model.attention import causal_attention
from tfbig.model.blockwise_attention import FASTER_FROM, BlockwiseAttention
from tfbig.model.recomputation import recomputed

FORMS = ("plain", "blockwise", "plain_xla", "blockwise_xla")


class AttentionForm:
    """Attends in one form; all blocks of a model share it, so that it is compiled once.

    Args:
      choice: one of FORMS, or "auto": blockwise where that is faster on CPU cores, else plain.
      dropout_rate: share of attention weights that is dropped where there are keys for it.
      first_head: index of the first head here in the full layer, which keys its dropout.
      recomputes: whether the plain form's scores are made again in the backward pass.
    """

    def __init__(
        self,
        choice: str = "auto",
        dropout_rate: float = 0.0,
        first_head: int = 0,
        recomputes: bool = False,
    ) -> None:
        self._rate, self._first_head, self._recomputes = dropout_rate, first_head, recomputes
        self._blockwise: BlockwiseAttention | None = None
        self._blockwise_from = FASTER_FROM if choice == "auto" else 1
        if not choice.startswith("plain"):
            self._blockwise = BlockwiseAttention(dropout_rate, first_head)
        self._compiled = None
        if choice.endswith("_xla"):
            self._compiled = tf.function(self._attend, autograph=False, jit_compile=True)

    def is_blockwise(self, num_positions: int | None) -> bool:
        """Returns whether samples of so many positions, None if unknown, are cut into blocks."""
        if self._blockwise is None or num_positions is None:
            return False
        return num_positions >= self._blockwise_from

    def __call__(
        self,
        query: tf.Tensor,
        key: tf.Tensor,
        value: tf.Tensor,
        document_ids: tf.Tensor | None = None,
        dropout_keys: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Returns what `tfbig.model.attention.causal_attention` returns, (B, T, H, d)."""
        run = self._attend
        if self._compiled is not None and query.shape.is_fully_defined():
            run = self._compiled

        def attend(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
            return run(query, key, value, document_ids, dropout_keys)

        if self._recomputes and not self.is_blockwise(query.shape[1]):
            return recomputed(attend, query, key, value)
        return attend(query, key, value)

    def _attend(
        self,
        query: tf.Tensor,
        key: tf.Tensor,
        value: tf.Tensor,
        document_ids: tf.Tensor | None,
        dropout_keys: tf.Tensor | None,
    ) -> tf.Tensor:
        tensors = (query, key, value, document_ids, dropout_keys)
        if self.is_blockwise(query.shape[1]):
            assert self._blockwise is not None
            return self._blockwise(*tensors)
        return causal_attention(*tensors, self._rate, self._first_head)
