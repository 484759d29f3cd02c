"""What enters a GPT: a vector for each token, plus one for its position.

B = batch, T = time, D = width, V = vocabulary.
"""

import keras
import tensorflow as tf

from tfbig.model.layers import Embedding
from tfbig.model.tensor_split import WHOLE, TensorSplit


class TokenAndPositionEmbedding(keras.layers.Layer):
    """A token's learned vector, plus its position's where there is a table of positions.

    Args:
      maxlen: number of positions.
      vocab_size: number of tokens.
      embed_dim: width D.
      with_positions: False leaves the position table out: with rotary embedding, and on the last
        pipeline stage of a model with a tied head, which needs only the token table.
      split: which part of the vocabulary is here.
    """

    def __init__(
        self,
        maxlen: int,
        vocab_size: int,
        embed_dim: int,
        *,
        with_positions: bool = True,
        split: TensorSplit = WHOLE,
        **kwargs,
    ) -> None:
        super().__init__(**kwargs)
        dtype = self.dtype_policy
        self.pos_emb, self.split = None, split
        self.first_token, num_rows = split.part(vocab_size)
        with keras.name_scope(self.name):
            self.token_emb = Embedding(num_rows, embed_dim, name="token_emb", dtype=dtype)
            if with_positions:
                self.pos_emb = Embedding(maxlen, embed_dim, name="pos_emb", dtype=dtype)
        self.built = True

    def call(self, tokens: tf.Tensor, position: tf.Tensor | None = None) -> tf.Tensor:
        """Returns (B, T, D) for tokens (B, T); positions default to 0 ... T-1.

        Where positions are shared, T of the result is this part's.
        """
        if self.pos_emb is None:
            return self._vectors(tokens)
        if position is None:
            position = tf.range(tf.shape(tokens)[1])
        position = self.split.own_positions(position, position.shape.rank - 1)
        return self._vectors(tokens) + self.pos_emb(position)

    def _vectors(self, tokens: tf.Tensor) -> tf.Tensor:
        if self.split.size == 1:
            return self.token_emb(tokens)  # (B, T, D)
        row = tokens - self.first_token
        here = (row >= 0) & (row < self.token_emb.num_rows)  # (B, T)
        vectors = self.token_emb(tf.where(here, row, 0))
        vectors = tf.where(here[..., tf.newaxis], vectors, tf.zeros((), vectors.dtype))
        return self.split.leave(vectors, "embedding")  # (B, T, D)
