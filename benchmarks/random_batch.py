"""A batch of random tokens, as a trainer takes it."""


def make_batch(rows: int, length: int, vocab_size: int) -> dict:
    """Returns a batch of `rows` samples of `length` tokens, none masked."""
    import numpy as np
    import tensorflow as tf

    tokens = np.random.default_rng(0).integers(0, vocab_size, (rows, length + 1), np.int32)
    return {
        "tokens": tf.constant(tokens),
        "sample_index": tf.range(rows, dtype=tf.int64),
        "source_index": tf.zeros([rows], tf.int32),
        "loss_mask": tf.ones([rows, length], tf.uint8),
    }
