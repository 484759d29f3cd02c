"""What a microbatch's forward pass knows besides the tokens."""

from collections.abc import Mapping
from dataclasses import dataclass

import tensorflow as tf

from tfbig.model.cached_attention import CacheView


@dataclass(frozen=True)
class Context:
    """Tensors of one microbatch; every pipeline stage makes them from its own batch.

    Not a tuple: Keras takes structures of arguments apart and refuses mixed ones.
    """

    step: tf.Tensor  # scalar int64: the optimizer step, which dropout depends on
    sample_index: tf.Tensor  # (B,) int64: positions in the run's stream of samples
    position: tf.Tensor  # (T,) or (B, T) int32: position within the sample or document
    document_ids: tf.Tensor | None  # (B, T) int32, or None: attention crosses documents
    training: bool  # whether dropout is on
    cache: CacheView | None = None  # what precedes the tokens, when decoding


def make_context(batch: Mapping[str, tf.Tensor], step: tf.Tensor, training: bool) -> Context:
    """Returns the context of a batch as the data pipeline makes it.

    Args:
      batch: tokens (B, S+1), sample_index (B,), and document_ids (B, S+1) where stored.
      step: scalar integer.
      training: whether dropout is on.
    """
    num_positions = batch["tokens"].shape[1] - 1
    position = tf.range(num_positions)  # (T,)
    document_ids = batch.get("document_ids")
    if document_ids is not None:
        document_ids = document_ids[:, :-1]  # (B, T)
        starts = tf.not_equal(document_ids[:, 1:], document_ids[:, :-1])  # (B, T-1)
        starts = tf.pad(starts, [[0, 0], [1, 0]], constant_values=True)  # (B, T)
        first = tf.where(starts, position, 0)  # (B, T): where a document begins, else 0
        # A running maximum: TF has no cumulative max, but positions only grow.
        first = tf.scan(tf.maximum, tf.transpose(first))  # (T, B)
        position = position - tf.transpose(first)  # (B, T)
    return Context(
        step=tf.cast(step, tf.int64),
        sample_index=batch["sample_index"],
        position=position,
        document_ids=document_ids,
        training=training,
    )
