"""The layers that both scripts build their GPT of, out of Keras' own."""

import tensorflow as tf


class TokenAndPositionEmbedding(tf.keras.layers.Layer):
    """A token's vector plus its position's."""

    def __init__(self, maxlen, vocab_size, embed_dim):
        super().__init__()
        self.token_emb = tf.keras.layers.Embedding(vocab_size, embed_dim)
        self.pos_emb = tf.keras.layers.Embedding(maxlen, embed_dim)

    def call(self, x):
        return self.token_emb(x) + self.pos_emb(tf.range(tf.shape(x)[-1]))  # (B, T, D)


class TransformerBlock(tf.keras.layers.Layer):
    """Causal attention and a feed-forward layer, each normalised behind its residual sum."""

    def __init__(self, embed_dim, num_heads, ff_dim, rate=0.1):
        super().__init__()
        self.att = tf.keras.layers.MultiHeadAttention(num_heads, key_dim=embed_dim)
        self.ffn = tf.keras.Sequential(
            [tf.keras.layers.Dense(ff_dim, activation="relu"), tf.keras.layers.Dense(embed_dim)]
        )
        self.layernorm1 = tf.keras.layers.LayerNormalization(epsilon=1e-6)
        self.layernorm2 = tf.keras.layers.LayerNormalization(epsilon=1e-6)
        self.dropout1 = tf.keras.layers.Dropout(rate)
        self.dropout2 = tf.keras.layers.Dropout(rate)

    def call(self, inputs, training=None):
        attended = self.att(inputs, inputs, use_causal_mask=True)
        attended = self.dropout1(attended, training=training)
        hidden = self.layernorm1(inputs + attended)
        fed = self.dropout2(self.ffn(hidden), training=training)
        return self.layernorm2(hidden + fed)  # (B, T, D)
