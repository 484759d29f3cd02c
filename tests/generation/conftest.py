"""A very small model with weights that matter, and its logits without a cache."""

import dataclasses

import pytest

from tests.distributed.parity_worker import make_config
from tests.model.test_gpt import TINY, randomise
from tests.trainers.test_decoding import whole_model

MAX_LENGTH, VOCABULARY = 150, 20


@pytest.fixture(scope="package")
def trainer():
    from trainers.single import SingleTrainer

    config = make_config({"fields": {"strategy": "single"}})
    model = dataclasses.replace(TINY, max_length=MAX_LENGTH)
    trainer = SingleTrainer(dataclasses.replace(config, model=model))
    trainer.build(training=False, vocab_size=VOCABULARY)
    randomise(trainer.model)
    return trainer


@pytest.fixture(scope="package")
def next_logits(trainer):
    """A function of a text that gives the logits (V,) of what follows it."""
    run = whole_model(trainer)

    def logits(text):
        import tensorflow as tf

        tokens = tf.constant([[*text, *[0] * (MAX_LENGTH - len(text))]], tf.int32)
        return run(tokens).numpy()[0, len(text) - 1, :VOCABULARY]

    return logits
