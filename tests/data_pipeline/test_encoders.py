import json
import unicodedata

import numpy as np
import pytest
import tokenizers
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


@pytest.fixture(scope="module")
def neox():
    return neox_like()


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


def neox_like():
    """A tokenizer.json as GPT-NeoX's: composition, and runs of spaces as tokens of their own."""
    made = tokenizers.Tokenizer.from_str(train_tokenizer(TEXTS, 300).decode())
    made.normalizer = tokenizers.normalizers.NFC()
    made.add_special_tokens(["<|padding|>"])
    runs = [" " * size for size in range(24, 1, -1)]
    made.add_tokens([tokenizers.AddedToken(run, special=False, normalized=True) for run in runs])
    return Tokenizer(made.to_str().encode())


@pytest.mark.parametrize("name", ["tiktoken", "tokenizers"])
@pytest.mark.parametrize("segment", [3, encoders.SEGMENT_CHARACTERS])
@given(
    parts=st.lists(
        st.sampled_from(
            [
                *"a self e\u0301 \u0301 \u1100\u1161 \u0958 \u037e \n \t 's 12 <|padding|>".split(
                    " "
                ),
                *(" " * size for size in (1, 2, 3, 7, 24, 31)),
                *(END_OF_TEXT, "\u3000", "\x85", "\U00011935\U00011930"),
            ]
        )
        | any_text,
        max_size=12,
    )
)
@settings(deadline=None, max_examples=150)
def test_composition_and_added_tokens_are_the_librarys(neox, name, segment, parts):
    original = encoders.SEGMENT_CHARACTERS
    try:
        encoders.SEGMENT_CHARACTERS = segment
        assert_encodes_like_the_library(neox, name, ["".join(parts), "def  f:\n    x\n" + " " * 9])
    finally:
        encoders.SEGMENT_CHARACTERS = original


def test_a_neox_tokenizers_own_tokens_are_used(neox):
    ids, _ = TokenEncoder(neox, "tiktoken").encode(["a    b", "e\u0301", END_OF_TEXT])
    runs = neox.matched_tokens
    assert len(runs) == 23 and runs[" " * 4] in ids and neox.end_of_text_id not in ids


def test_every_character_is_composed_as_the_library_composes_it(neox):
    """Among them are some that the library's Unicode does not know and Python's does."""
    known = (chr(c) for c in range(0x110000) if unicodedata.category(chr(c)) not in ("Cs", "Cn"))
    changed = [c for c in known if unicodedata.normalize("NFD", c) != c]
    assert len(changed) > 10_000
    compose, library = encoders.composer(neox), neox.library.normalizer.normalize_str
    for character in changed:
        for text in (character, unicodedata.normalize("NFD", character)):
            assert compose(text) == library(text), hex(ord(character))


@pytest.mark.parametrize(
    "change",
    [
        {"lstrip": True},
        {"single_word": True},
        {"normalized": False},
        {"content": "a b"},
        {"content": "|>"},
        {"content": "e\u0301"},
    ],
)
def test_added_tokens_that_are_matched_otherwise_are_left_to_the_library(neox, change):
    added = [*neox.description["added_tokens"]]
    added[-1] = {**added[-1], **change}
    other = Tokenizer(json.dumps({**neox.description, "added_tokens": added}).encode())
    with pytest.raises(UserError, match="--encoder=tiktoken cannot be used"):
        TokenEncoder(other, "tiktoken")


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
    found = TokenEncoder(tokenizer)
    assert found.name == "tiktoken"
    (note,) = found.notes
    assert "a slower encoder takes gigatoken's place" in note and "'tfbig[gigatoken]'" in note
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


def test_what_is_dropped_in_one_chunk_is_tried_again_in_the_next(tokenizer, monkeypatch):
    """A chunk's ids depend on what is in it alone: any process may take any after any."""
    other = TokenEncoder(Tokenizer(train_tokenizer(["zzzz" * 99], 300)), "tiktoken")._backend
    monkeypatch.setattr(encoders, "_gigatoken_backend", lambda _: other)
    found = TokenEncoder(tokenizer)
    assert "gigatoken's ids differ" in found.check(TEXTS) and found.name == "tiktoken"
    assert found.check(TEXTS) == ""  # of the same chunk
    found.begin()
    assert found.name == "gigatoken"
    assert "gigatoken's ids differ" in found.check(TEXTS) and found.name == "tiktoken"


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
    found.begin()  # the next chunk is compared as if it were the first
    seen.clear()
    assert found.check(["word " * 8000]) == "" and sum(seen) == 40_000
