"""A GPT as a SavedModel for TF Serving: token ids in, logits or more token ids out.

B = batch, T = time, V = vocabulary.
"""

import os

import numpy as np
import tensorflow as tf

from tfbig.model.context import Context
from tfbig.model.gpt import GPT


def _context(num_rows: tf.Tensor, num_positions: tf.Tensor) -> Context:
    return Context(
        step=tf.constant(0, tf.int64),
        sample_index=tf.range(tf.cast(num_rows, tf.int64)),
        position=tf.range(num_positions),
        document_ids=None,
        training=False,
    )


class ServedGPT(tf.Module):
    """What is saved: the model and its two signatures.

    Args:
      model: with weights, of plain attention, whose graph takes any length.
      vocab_size: true vocabulary; ids beyond are never generated.
      end_of_text_id: ends a text, and fills what comes behind.
    """

    def __init__(self, model: GPT, vocab_size: int, end_of_text_id: int) -> None:
        super().__init__(name="served_gpt")
        self.model = model
        self._vocab_size, self._end = vocab_size, end_of_text_id
        # SavedModel follows tf.Module's attributes; Keras' wrappers hide the variables from it.
        self.weights = [variable.value for variable in model.canonical_variables().values()]

    @tf.function(
        autograph=False, input_signature=[tf.TensorSpec([None, None], tf.int32, name="tokens")]
    )
    def logits(self, tokens: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns {"logits": (B, T, V) float32} of tokens (B, T)."""
        shape = tf.shape(tokens)
        hidden = self.model.hidden_state(tokens, _context(shape[0], shape[1]))
        return {"logits": tf.cast(self.model.logits(hidden), tf.float32)}

    @tf.function(
        autograph=False,
        input_signature=[
            tf.TensorSpec([None, None], tf.int32, name="tokens"),
            tf.TensorSpec([None], tf.int32, name="num_tokens"),
            tf.TensorSpec([], tf.int32, name="max_tokens"),
            tf.TensorSpec([], tf.float32, name="temperature"),
            tf.TensorSpec([], tf.int32, name="seed"),
        ],
    )
    def generate(
        self,
        tokens: tf.Tensor,
        num_tokens: tf.Tensor,
        max_tokens: tf.Tensor,
        temperature: tf.Tensor,
        seed: tf.Tensor,
    ) -> dict[str, tf.Tensor]:
        """Returns {"tokens": (B, T + n), "num_tokens": (B,)}: prompts with what follows them.

        Each new token passes the whole text through the model: there is no cache.

        Args:
          tokens: (B, T) prompts, each at the start of its row.
          num_tokens: (B,) at least 1, how many of a row's T are its prompt.
          max_tokens: to write at most; the model's positions are a limit too.
          temperature: divides the logits; 0 always takes the most likely token.
          seed: of the sampling.
        """
        num_rows = tf.shape(tokens)[0]
        room = tf.maximum(self.model.config.max_length - tf.reduce_max(num_tokens), 0)
        steps = tf.minimum(max_tokens, room)
        padding = tf.fill([num_rows, tf.maximum(steps, 0)], self._end)
        text = tf.concat([tokens, padding], 1)  # (B, T + n)
        column = tf.range(tf.shape(text)[1])
        text = tf.where(column < num_tokens[:, tf.newaxis], text, self._end)

        def more(step, text, length, ended):
            return (step < steps) & ~tf.reduce_all(ended)

        def write(step, text, length, ended):
            logits = self._next_logits(text[:, : tf.reduce_max(length)], length)
            token = self._choose(logits, temperature, tf.stack([seed, step]))  # (B,)
            ended |= token == self._end
            here = (column == length[:, tf.newaxis]) & ~ended[:, tf.newaxis]  # (B, T + n)
            text = tf.where(here, token[:, tf.newaxis], text)
            return step + 1, text, length + tf.cast(~ended, tf.int32), ended

        state = (tf.constant(0), text, num_tokens, tf.zeros([num_rows], tf.bool))
        shapes = (
            tf.TensorShape([]),
            tf.TensorShape([None, None]),
            tf.TensorShape([None]),
            tf.TensorShape([None]),
        )
        _, text, length, _ = tf.while_loop(more, write, state, shape_invariants=shapes)
        return {"tokens": text[:, : tf.reduce_max(length)], "num_tokens": length}

    def _next_logits(self, tokens: tf.Tensor, length: tf.Tensor) -> tf.Tensor:
        """Returns logits (B, V) after each row's last token, float32."""
        shape = tf.shape(tokens)
        hidden = self.model.hidden_state(tokens, _context(shape[0], shape[1]))  # (B, T, D)
        last = tf.gather(hidden, length - 1, batch_dims=1)  # (B, D)
        logits = tf.cast(self.model.logits(last[:, tf.newaxis])[:, 0], tf.float32)
        known = tf.range(tf.shape(logits)[1]) < self._vocab_size
        return tf.where(known, logits, -np.inf)

    def _choose(self, logits: tf.Tensor, temperature: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        likeliest = tf.argmax(logits, 1, tf.int32)
        scaled = logits / tf.where(temperature > 0.0, temperature, 1.0)
        drawn = tf.random.stateless_categorical(scaled, 1, seed, tf.int32)[:, 0]
        return tf.where(temperature > 0.0, drawn, likeliest)


def write_saved_model(
    directory: str | os.PathLike[str], model: GPT, vocab_size: int, end_of_text_id: int
) -> None:
    """Writes a SavedModel with the signatures serving_default (logits) and generate.

    Args:
      directory: to write into; TF Serving wants its name to be a number.
      model: with weights.
      vocab_size: true vocabulary.
      end_of_text_id: ends a text.
    """
    served = ServedGPT(model, vocab_size, end_of_text_id)
    tf.saved_model.save(
        served,
        os.fspath(directory),
        signatures={"serving_default": served.logits, "generate": served.generate},
    )
