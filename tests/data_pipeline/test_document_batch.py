"""Documents in columns are the documents that come one by one, counted alike."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline import document_batch
from data_pipeline.document_batch import DocumentBatch, plain_batch
from data_pipeline.documents import SPLITS, Filters, ReadCounts, filtered, splits_of
from data_pipeline.input_files import InputFile, RecordFormat
from data_pipeline.reading import Piece, PieceReader
from tfbig.errors import UserError

SET = "pile_set_name"
PLAIN = [
    {"text": "a", "meta": {SET: "Github"}},
    {"text": "\u00e9\u2028 long enough to stay", "meta": {SET: "Bibliotik"}},
    {"text": "b", "meta": None},
    {"text": "c", "meta": {SET: 5}},
    {"text": "d", "meta": {SET: []}},
    {"text": "e"},
    {"text": "f", "meta": {SET: ""}},
]
ODD = [
    *(json.dumps(value).encode() for value in ({"text": ""}, {"text": ["x", "y"]}, "bare", "", [])),
    b'{"text": "\\ud800"}',
    b'{"text": 5}',
    b'{"body": "a"}',
    b"",
    b"\r",
    b"no json",
    b"null",
]
lines = st.lists(
    st.sampled_from([json.dumps(value).encode() for value in PLAIN] * 3 + ODD), max_size=12
)


def counted(counts):
    return counts.documents, counts.skipped, counts.changed, counts.bad, counts.bad_records


@given(
    lines,
    st.sampled_from([Filters(), Filters(min_characters=3), Filters(0, 5, ("Github",))]),
    st.sampled_from([RecordFormat(), RecordFormat("text", "", "mine"), RecordFormat("meta.x")]),
    st.booleans(),
)
def test_in_columns_as_one_by_one(tmp_path_factory, lines, filters, record_format, bom):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" * bom + b"\n".join(lines))
    item = InputFile(str(path), "a.jsonl", format=record_format)
    counts, expected_counts = ReadCounts(1.0), ReadCounts(1.0)
    one_by_one = PieceReader(item, Piece(0), expected_counts)
    expected = list(filtered(iter(one_by_one), filters, expected_counts))
    reader = PieceReader(item, Piece(0), counts)
    batches = list(reader.batches(filters))
    found = [
        (text, data, source, (key, check))
        for batch in batches
        for text, data, source, key, check in zip(
            *batch[:3], batch.keys.tolist(), batch.checks.tolist(), strict=True
        )
    ]
    assert found == [(d.text, d.data, d.source, tuple(d.digest)) for d in expected]
    assert counted(counts) == counted(expected_counts)
    assert reader.sha256 == one_by_one.sha256 != ""


def test_plain_lines_are_taken_together_and_others_are_not():
    plain = [json.dumps(value).encode() for value in PLAIN]
    batch = plain_batch(plain, RecordFormat())
    assert batch is not None and batch.sources[:4] == ["Github", "Books3", "text", "text"]
    for odd in ODD:
        assert plain_batch([*plain, odd], RecordFormat()) is None


def test_a_record_is_named_by_its_line_in_whatever_batch(tmp_path):
    good = json.dumps({"text": "words " * 1000}).encode()
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([good] * 900 + [b'{"text": 5}', good]))
    item = InputFile(str(tmp_path / "a.jsonl"), "a.jsonl")
    with pytest.raises(UserError, match=r"a\.jsonl line 901 has a text that is int"):
        list(PieceReader(item, Piece(0), ReadCounts()).batches(Filters()))


def test_batches_are_worth_several_threads_and_hold_every_prompt(monkeypatch, tmp_path):
    monkeypatch.setattr(document_batch, "_BATCH_CHARACTERS", 50)
    monkeypatch.setattr(document_batch, "_GROUP_CHARACTERS", 10)
    records = [{"prompt": "p" * (k % 2), "completion": f"answer {k}"} for k in range(40)]
    (tmp_path / "a.json").write_text(json.dumps(records))
    item = InputFile(
        str(tmp_path / "a.json"), "a.json", "json", format=RecordFormat(prompt="prompt")
    )
    batches = list(PieceReader(item, Piece(0), ReadCounts()).batches(Filters()))
    assert 5 < len(batches) < 10
    prompts = [p for batch in batches for p in batch.prompts or [""] * len(batch.texts)]
    assert prompts == [record["prompt"] for record in records]
    (half,) = [batches[0].chosen(np.arange(len(batches[0].texts)) % 2 == 0)]
    assert half.prompts == batches[0].prompts[::2] and half.texts == batches[0].texts[::2]
    assert len(DocumentBatch.of([]).keys) == 0


def test_a_split_begins_at_its_share():
    keys = np.array([0, 2**63 - 1024, 2**63, 3 * 2**62, 2**64 - 1], np.uint64)
    found = [SPLITS[number] for number in splits_of(keys, 0.5, 0.25)]
    assert found == ["validation", "validation", "test", "train", "train"]
    assert {SPLITS[number] for number in splits_of(keys, 0.0, 0.0)} == {"train"}
