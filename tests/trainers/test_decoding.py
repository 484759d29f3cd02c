"""The decode cache against the whole model run again: every family, dtype, row and order."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tests.distributed.parity_worker import make_config
from tests.model.test_gpt import BLOG, NEOX, TINY, randomise
from tfbig.model.context import make_context
from trainers.decode_cache import DeviceStore, HostStore
from trainers.single import SingleTrainer

LENGTH, VOCABULARY = 150, 21  # longer than two blocks of the cache; two ids are no tokens
FAMILIES = {
    name: dataclasses.replace(config, max_length=LENGTH)
    for name, config in {"gpt2": TINY, "blog": BLOG, "neox": NEOX}.items()
}
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.05, "float16": 0.01}


def make(family: str, precision: str = "float32", **fields: object) -> SingleTrainer:
    config = make_config({"fields": {"strategy": "single", "precision": precision, **fields}})
    trainer = SingleTrainer(dataclasses.replace(config, model=FAMILIES[family]))
    trainer.build(training=False, vocab_size=VOCABULARY)
    randomise(trainer.model)
    return trainer


def whole_model(trainer: SingleTrainer):
    """Returns a function of tokens (B, LENGTH) that gives all logits by one pass of the model."""

    @tf.function(autograph=False)
    def run(tokens):
        rows = tokens.shape[0]
        batch = {
            "tokens": tf.pad(tokens, [[0, 0], [0, 1]]),
            "sample_index": tf.range(rows, dtype=tf.int64),
        }
        hidden = trainer.model.hidden_state(tokens, make_context(batch, tf.constant(0), False))
        return tf.cast(trainer.model.logits(hidden), tf.float32)

    return run


class Rows:
    """What a cache must stand for: the text of each row."""

    def __init__(self, trainer: SingleTrainer, num_rows: int, store: type = HostStore) -> None:
        self.trainer, self.texts = trainer, [[] for _ in range(num_rows)]
        self.cache = trainer._decoder.new_cache(num_rows, LENGTH, store)
        self.random = np.random.default_rng(num_rows)
        self.whole = whole_model(trainer)

    def feed(self, counts, width=None, source=None, reset=()) -> np.ndarray:
        source = np.arange(len(counts)) if source is None else np.array(source)
        width = width or max(max(counts), 1)
        tokens = self.random.integers(0, VOCABULARY, (len(counts), width), np.int32)
        flags = np.isin(np.arange(len(counts)), reset)
        self.texts = [
            ([] if flags[row] else list(self.texts[source[row]])) + tokens[row, :count].tolist()
            for row, count in enumerate(counts)
        ]
        logits, self.cache = self.trainer.decode_step(
            tokens, np.array(counts, np.int32), source.astype(np.int32), flags, self.cache
        )
        return logits

    def check(self, logits: np.ndarray, precision: str = "float32") -> None:
        padded = [text + [0] * (LENGTH - len(text)) for text in self.texts]
        expected = self.whole(tf.constant(padded, tf.int32)).numpy()[:, :, :VOCABULARY]
        for row, text in enumerate(self.texts):
            if text:
                wanted = expected[row, len(text) - 1]
                difference = np.abs(logits[row, :VOCABULARY] - wanted).max() / np.abs(wanted).max()
                assert difference < TOLERANCE[precision], f"row {row} after {len(text)} tokens"
        assert np.all(np.isneginf(logits[:, VOCABULARY:]))


def walk(rows: Rows, precision: str = "float32") -> int:
    """Returns the longest row's tokens in the end.

    Ragged prompts, single tokens, rows that pause, begin anew, and go on from another's past.
    """
    rows.check(rows.feed([5, 1, 9]), precision)
    for counts in ([1, 1, 1], [1, 0, 1], [0, 1, 1]):
        rows.check(rows.feed(counts), precision)
    rows.check(rows.feed([3, 60, 0], width=70), precision)  # across a block's end
    rows.check(rows.feed([1, 1, 1], source=[1, 1, 0]), precision)
    rows.check(rows.feed([0, 0, 0], source=[2, 0, 1]), precision)
    rows.check(rows.feed([0, 2, 0], source=[2, 0, 1], reset=[1]), precision)
    rows.check(rows.feed([0, 1, 0], source=[0, 0, 0], width=4), precision)
    free = LENGTH - max(map(len, rows.texts))
    rows.check(rows.feed([free] * 3), precision)
    return max(map(len, rows.texts))


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_whole_model(family):
    trainer = make(family)
    assert walk(Rows(trainer, 3)) == LENGTH
    assert trainer._decoder.num_traces == 2, "one step of all rows, one of some"
    walk(Rows(trainer, 3))
    rows = Rows(trainer, 1)
    for count in (7, 1, 1, 20):
        rows.check(rows.feed([count]))
    assert trainer._decoder.num_traces == 2, "no other length or number of rows is traced again"


@pytest.mark.parametrize(
    ("family", "precision"), [*((name, "bfloat16") for name in FAMILIES), ("gpt2", "float16")]
)
def test_equals_the_whole_model_in_half_precision(family, precision):
    assert walk(Rows(make(family, precision), 3), precision) == LENGTH


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_variables_on_the_device_hold_the_same(precision):
    assert walk(Rows(make("neox", precision), 3, DeviceStore), precision) == LENGTH


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_is_frozen_is_decoded_with_too(precision):
    """Frozen variables are kept apart from the others, so that their order is not the model's."""
    logits = []
    for freeze in ([], ["embedding_layer/token_emb", "*/ffn/*", "*/layernorm1/gamma"]):
        rows = Rows(make("gpt2", precision, freeze=freeze), 2)
        logits.append(rows.feed([3, 5]))
        rows.check(logits[-1], precision)
    np.testing.assert_array_equal(*logits)


def test_a_cache_sees_the_weights_of_the_time_it_was_made():
    trainer = make("gpt2", "bfloat16")
    rows = Rows(trainer, 2)
    before = rows.feed([4, 2])
    for variable in trainer.model.canonical_variables().values():
        variable.assign(variable * 0.5)
    old = rows.feed([0, 0])
    np.testing.assert_array_equal(before, old)
    rows = Rows(trainer, 2)
    rows.check(rows.feed([4, 2]), "bfloat16")


def test_neighbours_change_no_bit_of_a_row():
    """A prompt fed alone and single steps: the same logits beside seven others, of any length."""
    trainer = make("neox")

    def logits(neighbours: list[int]) -> list[np.ndarray]:
        rows = Rows(trainer, 8)
        for row, count in enumerate(neighbours):
            if count:
                rows.feed([count if r == row else 0 for r in range(8)], width=140)
        rows.random = np.random.default_rng(0)
        counts = [0] * 7 + [12]
        found = [rows.feed(counts, width=16)[7]]
        text = rows.texts[7]
        rows.random = np.random.default_rng(1)
        found += [rows.feed([int(n > 0) for n in neighbours] + [1])[7] for _ in range(6)]
        return [np.array(text), *found]

    for one, other in zip(logits([0] * 7), logits([130, 3, 64, 65, 1, 80, 17]), strict=True):
        np.testing.assert_array_equal(one, other)


def test_more_than_a_cache_holds_is_refused():
    rows = Rows(make("gpt2"), 1)
    rows.feed([LENGTH])
    with pytest.raises(AssertionError, match="longer than the cache"):
        rows.feed([1])
