import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from data_pipeline.tokenizer import END_OF_TEXT, Tokenizer, byte_alphabet, train_tokenizer
from tfbig.errors import UserError

TEXTS = ["def f(self):\n    return self.x  # épée\n" * 20, "the cat sat on the mat 🙂 1234\t" * 20]


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer(TEXTS, 300)


@pytest.fixture(scope="module")
def tokenizer(trained):
    return Tokenizer(trained)


def changed(trained, **changes):
    return json.dumps(json.loads(trained) | changes).encode()


def test_training_is_deterministic_and_as_large_as_asked(trained, tokenizer):
    assert train_tokenizer(iter(TEXTS), 300) == trained
    assert tokenizer.vocab_size == 300 and tokenizer.dtype == np.uint16
    assert tokenizer.end_of_text_id == 0


def test_little_text_gives_a_smaller_vocabulary():
    assert Tokenizer(train_tokenizer(["ab"], 300)).vocab_size == 258
    with pytest.raises(UserError, match="--vocab_size=256 is too small"):
        train_tokenizer(["ab"], 256)


@given(st.text(st.characters(exclude_categories=["Cs"])))
@settings(deadline=None)
def test_any_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.num_bytes(ids) == len(text.encode())
    assert (ids < tokenizer.vocab_size).all() and ids.dtype == tokenizer.dtype


def test_a_special_tokens_name_in_a_text_is_text(tokenizer):
    ids = tokenizer.encode(f"a{END_OF_TEXT}b")
    assert tokenizer.end_of_text_id not in ids
    assert tokenizer.decode(ids) == f"a{END_OF_TEXT}b"
    assert tokenizer.decode([tokenizer.end_of_text_id]) == END_OF_TEXT
    assert tokenizer.num_bytes(np.array([tokenizer.end_of_text_id])) == 0


def test_bytes_of_single_tokens_join_to_the_text(tokenizer):
    text = "日本 🙂"
    pieces = [tokenizer.decode_bytes([token]) for token in tokenizer.encode(text)]
    assert b"".join(pieces) == text.encode()
    assert any(len(piece.decode(errors="ignore")) == 0 for piece in pieces)  # half a character


def test_the_alphabet_is_the_librarys():
    assert set(byte_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))


def test_a_vocabulary_and_its_merges_are_a_tokenizer(tmp_path, trained, tokenizer):
    description = json.loads(trained)["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(description["vocab"]))
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in description["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    for path in (tmp_path, f"{tmp_path}/vocab.json,{tmp_path}/merges.txt"):
        found = Tokenizer.load(path)
        assert found.end_of_text_id == tokenizer.end_of_text_id
        for text in [*TEXTS, END_OF_TEXT]:
            assert np.array_equal(found.encode(text), tokenizer.encode(text))
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(UserError, match=r"cannot read tokenizer .*merges\.txt"):
        Tokenizer.load(tmp_path)


def test_a_file_that_is_no_byte_level_bpe_is_refused(tmp_path, trained):
    with pytest.raises(UserError, match="cannot read tokenizer"):
        Tokenizer.load(tmp_path / "none.json")
    for contents in (b"{}", b"\xff", b"not json"):
        (tmp_path / "bad.json").write_bytes(contents)
        with pytest.raises(UserError, match=r"bad\.json is not a tokenizer\.json"):
            Tokenizer.load(tmp_path / "bad.json")
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(UserError, match="not a byte-level BPE"):
        Tokenizer(words.to_str().encode())
    with pytest.raises(UserError, match="not a byte-level BPE"):
        Tokenizer(changed(trained, pre_tokenizer={"type": "Whitespace"}))
    renamed = trained.replace(END_OF_TEXT.encode(), b"<eos>")
    with pytest.raises(UserError, match=r"no token <\|endoftext\|>"):
        Tokenizer(renamed)
