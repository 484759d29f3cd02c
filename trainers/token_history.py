"""A decode cache that keeps the tokens and runs the whole model again for each step."""

from typing import NamedTuple

import numpy as np
import tensorflow as tf


class TokenHistory(NamedTuple):
    """The tokens so far."""

    tokens: tf.Tensor  # (R, L) int32
    length: tf.Tensor  # (R,) int32


def empty_history(num_rows: int, max_length: int) -> TokenHistory:
    """Returns a history without tokens."""
    return TokenHistory(tf.zeros([num_rows, max_length], tf.int32), tf.zeros([num_rows], tf.int32))


def new_tokens(
    tokens: np.ndarray, num_valid: np.ndarray, source_row: np.ndarray, reset: np.ndarray
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the arguments of Trainer.decode_step as tensors, as `extend` takes them."""
    return (
        tf.constant(tokens, tf.int32),
        tf.constant(num_valid, tf.int32),
        tf.constant(source_row, tf.int32),
        tf.constant(reset, tf.bool),
    )


def extend(
    history: TokenHistory,
    tokens: tf.Tensor,
    num_valid: tf.Tensor,
    source_row: tf.Tensor,
    reset: tf.Tensor,
) -> TokenHistory:
    """Returns the history with the next tokens; arguments as for Trainer.decode_step."""
    known = tf.gather(history.tokens, source_row)  # (B, L)
    length = tf.where(reset, 0, tf.gather(history.length, source_row))  # (B,)
    place = tf.range(known.shape[1]) - length[:, tf.newaxis]  # (B, L): index into the new tokens
    is_new = (place >= 0) & (place < num_valid[:, tf.newaxis])
    new = tf.gather(tokens, tf.clip_by_value(place, 0, tokens.shape[1] - 1), batch_dims=1)
    return TokenHistory(tf.where(is_new, new, known), length + num_valid)
