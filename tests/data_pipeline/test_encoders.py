import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline import encoders
from data_pipeline.encoders import TokenEncoder, split_long
from data_pipeline.tokenizer import END_OF_TEXT, Tokenizer, train_tokenizer
from tfbig.errors import UserError

TEXTS = ["def f(self):\n    return self.x  # épée\n" * 20, "the cat sat on the mat 🙂 1234\t" * 20]
any_text = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer(TEXTS, 300)


@pytest.fixture(scope="module")
def tokenizer(trained):
    return Tokenizer(trained)


def encoder(tokenizer, name):
    if name == "gigatoken":
        pytest.importorskip("gigatoken")
    return TokenEncoder(tokenizer, name)


def assert_encodes_like_the_library(tokenizer, name, texts):
    made = encoder(tokenizer, name)
    ids, lengths = made.encode(texts, num_threads=2)
    again, _ = made.encode(texts, 1, [text.encode() for text in texts])
    assert ids.dtype == tokenizer.dtype and len(ids) == lengths.sum()
    assert np.array_equal(again, ids)
    for text, found in zip(texts, np.split(ids, np.cumsum(lengths)[:-1]), strict=True):
        assert np.array_equal(found, tokenizer.encode(text)), text


@pytest.mark.parametrize("name", encoders.BACKENDS)
@given(texts=st.lists(any_text, max_size=4))
@settings(deadline=None, max_examples=60)
def test_ids_are_the_librarys(tokenizer, name, texts):
    texts = [*texts, "", "a  b\n\n   c's 42 " + END_OF_TEXT]
    assert_encodes_like_the_library(tokenizer, name, texts)


@pytest.mark.parametrize("name", ["tiktoken", "tokenizers"])
@given(
    st.lists(st.sampled_from(["a", " ", "\n", "é", "1", "\x1c", "\x85", "'s", "."]), max_size=60)
)
@settings(deadline=None, max_examples=150)
def test_a_long_text_may_be_cut_anywhere_it_is_cut(tokenizer, name, parts):
    text, original = "".join(parts), encoders.SEGMENT_CHARACTERS
    try:
        encoders.SEGMENT_CHARACTERS = 3
        pieces = split_long(text)
        assert "".join(pieces) == text
        assert_encodes_like_the_library(tokenizer, name, [text])
    finally:
        encoders.SEGMENT_CHARACTERS = original


def test_long_text_is_cut_and_text_without_a_safe_place_is_not(monkeypatch):
    monkeypatch.setattr(encoders, "SEGMENT_CHARACTERS", 100)
    assert max(len(piece) for piece in split_long("word " * 1000)) < 110
    assert split_long("x" * 1000) == ["x" * 1000]
    assert split_long(" " * 1000) == [" " * 1000]


def test_auto_takes_the_fastest_that_fits(trained, tokenizer):
    pytest.importorskip("gigatoken")
    assert TokenEncoder(tokenizer).name == "gigatoken"
    # An added token that is not special is matched in texts: tiktoken's core can't do that.
    description = json.loads(trained)
    extra = dict(description["added_tokens"][0], id=300, content="self.", special=False)
    contents = {**description, "added_tokens": [*description["added_tokens"], extra]}
    other = Tokenizer(json.dumps(contents).encode())
    with pytest.raises(UserError, match="--encoder=tiktoken cannot be used"):
        TokenEncoder(other, "tiktoken")
    found = TokenEncoder(other)
    found.check(TEXTS)
    ids, _ = found.encode(TEXTS)
    assert np.array_equal(ids, np.concatenate([other.encode(text) for text in TEXTS]))
    assert 300 in ids and other.num_bytes(np.array([300, 0])) == 5


def test_a_missing_backend_is_named(tokenizer, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "gigatoken", None)
    assert TokenEncoder(tokenizer).name == "tiktoken"
    with pytest.raises(UserError, match="--encoder=gigatoken cannot be used"):
        TokenEncoder(tokenizer, "gigatoken")


def test_a_backend_that_differs_is_dropped_aloud(tokenizer):
    fine = TokenEncoder(tokenizer)
    name = fine.name
    assert fine.check(TEXTS) == "" and fine.name == name
    other = TokenEncoder(tokenizer)
    other._backend = TokenEncoder(Tokenizer(train_tokenizer(["zzzz" * 99], 300)), name)._backend
    assert f"{name}'s ids differ from the tokenizers library's" in other.check(TEXTS)
    assert other.name != name
    ids, _ = other.encode(TEXTS)
    assert np.array_equal(ids, np.concatenate([tokenizer.encode(text) for text in TEXTS]))


def test_a_sample_of_every_input_is_compared(tokenizer, monkeypatch):
    """All of the first inputs, then a share of each: the library is slow."""
    seen = []
    original = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text: seen.append(len(text)) or original(text))
    found = TokenEncoder(tokenizer, "tiktoken")
    for size, compared in ((40_000, 40_000), (40_000, 25_536), (100, 100), (5000, 256)):
        seen.clear()
        assert found.check(["word " * (size // 5)]) == "" and sum(seen) == compared
    seen.clear()
    assert found.check(["word " * 200] * 4000) == "" and sum(seen) == 62_500  # of 4 million
