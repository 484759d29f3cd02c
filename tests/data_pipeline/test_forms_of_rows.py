"""Preparations whose rows are not simply joined text, and sources that are tokens."""

import dataclasses
import json
import re
import zipfile

import numpy as np
import pytest
from sample_corpus import SEQUENCE_LENGTH, corpus_documents

from data_pipeline.dataset import TokenData
from data_pipeline.exporting import export_megatron
from data_pipeline.preparation import prepare
from data_pipeline.stdlib_corpus import encode_jsonl_zst
from data_pipeline.token_store import IndexedTokens
from data_pipeline.verifying import find_problems
from tfbig.errors import UserError


def quiet(text):
    pass


@pytest.fixture
def with_tokenizer(prepare_config, data_folder):
    return dataclasses.replace(
        prepare_config, tokenizer=str(data_folder / "tokenizer.json"), workers=1
    )


def everything(data, split="train"):
    return data.rows_in_order(split, np.arange(data.num_rows(split)))


def texts_of(data, batch):
    """Returns the texts of rows that hold documents whole."""
    found = []
    for tokens, mask in zip(batch["tokens"], batch["loss_mask"], strict=True):
        labels = tokens[1:][: np.flatnonzero(mask)[-1] + 1]
        ends = np.flatnonzero(labels == data.end_of_text_id)
        found += [data.tokenizer.decode(part) for part in np.split(labels, ends + 1)[:-1]]
    return [text.removesuffix("<|endoftext|>") for text in found]


@pytest.mark.parametrize("packing", ["best_fit", "single"])
def test_documents_that_fit_stand_whole_in_their_rows(with_tokenizer, packing):
    config = dataclasses.replace(
        with_tokenizer, packing=packing, sequence_length=400, document_mask=True, shard_bytes=20000
    )
    data = TokenData.open(prepare(config, quiet))
    found = []
    for split in data.splits:
        batch = everything(data, split)
        found += texts_of(data, batch)
        assert batch["loss_mask"].dtype == np.uint8 and batch["document_ids"].dtype == np.int32
        ends = batch["tokens"] == data.end_of_text_id
        assert ends[:, 0].all()  # every row begins a document
        assert np.array_equal(batch["document_ids"], np.cumsum(ends, axis=1) - 1)
        labels = batch["tokens"][:, 1:][batch["loss_mask"] == 1]
        assert data.num_bytes(split) == data.tokenizer.num_bytes(labels)
    assert sorted(found) == sorted(text for text, _ in corpus_documents())
    rows = sum(data.num_rows(split) for split in data.splits)
    assert rows == 90 if packing == "single" else rows < 60
    assert not list(find_problems(data.folder, quiet))


def test_a_padded_tail_loses_nothing(with_tokenizer):
    config = dataclasses.replace(with_tokenizer, tail="pad", document_mask=True)
    data = TokenData.open(prepare(config, quiet))
    found = []
    for split in data.splits:
        batch = everything(data, split)
        for index in range(len(data.sources)):
            chosen = batch["source_index"] == index
            labels = batch["tokens"][chosen][:, 1:][batch["loss_mask"][chosen] == 1]
            ends = np.flatnonzero(labels == data.end_of_text_id)
            found += [data.tokenizer.decode(p[:-1]) for p in np.split(labels, ends + 1)[:-1]]
    assert sorted(found) == sorted(text for text, _ in corpus_documents())
    ids = batch["document_ids"]
    assert (np.diff(ids, axis=1) == (batch["tokens"][:, 1:] == data.end_of_text_id)).all()
    assert (ids[:, 0] == 0).all()


def of_pairs(config, folder):
    """Sixty prompts with completions as the source; returns them too."""
    source = folder / "pairs.jsonl"
    pairs = [(f"What is {n} and {n}?", f" It is {2 * n}.") for n in range(60)]
    source.write_text("".join(json.dumps({"q": q, "a": a}) + "\n" for q, a in pairs))
    fields = {"source": str(source), "prompt_field": "q", "completion_field": "a"}
    return dataclasses.replace(config, **fields), pairs


@pytest.mark.parametrize("packing", ["best_fit", "single", "join"])
def test_prompts_are_read_and_completions_are_learned(with_tokenizer, tmp_path, packing):
    config, pairs = of_pairs(with_tokenizer, tmp_path)
    config = dataclasses.replace(
        config,
        packing=packing,
        sequence_length=60,
        tail="pad",
    )
    data = TokenData.open(prepare(config, quiet))
    learned, read = "", ""
    for split in data.splits:
        batch = everything(data, split)
        labels = batch["tokens"][:, 1:]
        learned += data.tokenizer.decode(labels[batch["loss_mask"] == 1])
        read += data.tokenizer.decode(labels.ravel())
    answers = [part for part in learned.split("<|endoftext|>") if part]
    assert sorted(answers) == sorted(answer for _, answer in pairs)
    assert all(question in read for question, _ in pairs) or packing == "join"
    too_short = dataclasses.replace(config, data=str(tmp_path / "short"), sequence_length=8)
    with pytest.raises(UserError, match=r"pairs\.jsonl line 1 is longer than --sequence_length=8"):
        prepare(too_short, quiet)


@pytest.mark.parametrize("form", ["pairs", "chats"])
def test_records_that_are_too_long_are_named_by_file_and_line(with_tokenizer, tmp_path, form):
    source = tmp_path / "a.jsonl"
    records = []
    for n in range(60):
        answer = f"It is {2 * n}." * (9 if n in (20, 41) else 1)
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
        records.append({"q": "?", "a": answer} if form == "pairs" else {"turns": turns})
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    fields = {"prompt_field": "q", "completion_field": "a"}
    config = dataclasses.replace(
        with_tokenizer,
        source=str(source),
        packing="single",
        sequence_length=60,
        max_bad_fraction=0.1,
        **fields if form == "pairs" else {"chat_field": "turns"},
    )
    folder = prepare(config, quiet)
    listed = [json.loads(r) for r in (folder / "bad_records.jsonl").read_text().splitlines()]
    assert [(r["file"], r["place"]) for r in listed] == [
        (str(source), "line 21"),
        (str(source), "line 42"),
    ]
    assert all("is longer than --sequence_length=60" in r["reason"] for r in listed)
    pieces = dataclasses.replace(config, data=str(tmp_path / "pieces"), chunk_bytes=500)
    again = (prepare(pieces, quiet) / "bad_records.jsonl").read_bytes()
    assert again == (folder / "bad_records.jsonl").read_bytes()


# Tokens as a source.


def stream(data, split):
    return [everything(data, split)["tokens"], data.num_bytes(split)]


def test_kept_tokens_give_another_length_without_the_text(with_tokenizer, data_folder, tmp_path):
    changes = {"data": str(tmp_path / "again"), "source": f"tokens:{data_folder}"}
    again = TokenData.open(prepare(dataclasses.replace(with_tokenizer, **changes), quiet))
    before = TokenData.open(data_folder)
    assert again.sources == before.sources
    for split in before.splits:
        for one, other in zip(stream(again, split), stream(before, split), strict=True):
            assert np.array_equal(one, other)
    longer = {**changes, "sequence_length": 50, "data": str(tmp_path / "longer")}
    data = TokenData.open(prepare(dataclasses.replace(with_tokenizer, **longer), quiet))
    from_text = {"sequence_length": 50, "data": str(tmp_path / "text")}
    expected = TokenData.open(prepare(dataclasses.replace(with_tokenizer, **from_text), quiet))
    for one, other in zip(stream(data, "train"), stream(expected, "train"), strict=True):
        assert np.array_equal(one, other)
    with pytest.raises(UserError, match="kept no token store"):
        prepare(
            dataclasses.replace(
                with_tokenizer, source=f"tokens:{data.folder}", data=str(tmp_path / "no")
            ),
            quiet,
        )


@pytest.mark.parametrize("kept", [True, False])
def test_megatrons_files_are_written_and_read_back(with_tokenizer, data_folder, tmp_path, kept):
    folder = data_folder
    if not kept:
        folder = prepare(dataclasses.replace(with_tokenizer, tail="pad"), quiet)
    documents, tokens = export_megatron(folder, tmp_path / "out" / "mine", "train")
    found = IndexedTokens(tmp_path / "out" / "mine")
    assert (found.num_documents, len(found.tokens)) == (documents, tokens)
    data = TokenData.open(folder)
    ends = found.tokens == data.end_of_text_id
    assert np.array_equal(np.flatnonzero(ends) + 1, found.ends)
    changes = {"source": f"megatron:{tmp_path / 'out' / 'mine'}", "data": str(tmp_path / "back")}
    back = prepare(
        dataclasses.replace(with_tokenizer, **changes, validation_fraction=0, tail="pad"), quiet
    )
    counts = json.loads((back / "manifest.json").read_text())["splits"]["train"]["sources"]
    assert list(counts) == ["mine"]
    assert counts["mine"]["documents"] == documents and counts["mine"]["tokens"] == tokens
    assert not list(find_problems(back, quiet))


@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_prompts_are_exported_with_what_follows_them(with_tokenizer, tmp_path, tail):
    config, pairs = of_pairs(with_tokenizer, tmp_path)
    config = dataclasses.replace(
        config,
        tail=tail,
        sequence_length=40,
        validation_fraction=0,
    )
    data = TokenData.open(prepare(config, quiet))
    export_megatron(data.folder, tmp_path / "out", "train")
    found = IndexedTokens(tmp_path / "out")
    texts = [data.tokenizer.decode(part[:-1]) for part in np.split(found.tokens, found.ends[:-1])]
    expected = [question + answer for question, answer in pairs]
    if tail == "pad":
        assert sorted(texts) == sorted(expected)
    else:  # the last one may be cut
        assert len(texts) > 50 and set(texts[:-1]) <= set(expected)
        assert any(text.startswith(texts[-1]) for text in expected)


def test_nanogpts_files(with_tokenizer, data_folder, tmp_path):
    data = TokenData.open(data_folder)
    end = data.end_of_text_id
    texts = [text for text, _ in corpus_documents()]
    for name, part in (("train", texts[:70]), ("val", texts[70:])):
        ids = [token for text in part for token in [*data.tokenizer.encode(text), end]]
        np.array(ids, np.uint16).tofile(tmp_path / f"{name}.bin")
    config = dataclasses.replace(with_tokenizer, source=f"nanogpt:{tmp_path}")
    found = json.loads((prepare(config, quiet) / "manifest.json").read_text())
    splits = {name: split["sources"] for name, split in found["splits"].items()}
    assert splits["train"]["train"]["documents"] == 70
    assert splits["validation"]["val"]["documents"] == 20
    np.array([5, 400], np.uint16).tofile(tmp_path / "train.bin")
    other = dataclasses.replace(config, data=str(tmp_path / "other"))
    with pytest.raises(UserError, match=r"ids from 5 to 400, beyond the tokenizer's 320"):
        prepare(other, quiet)
    (tmp_path / "train.bin").write_bytes(b"123")
    with pytest.raises(UserError, match="no whole number of uint16 ids"):
        prepare(other, quiet)
    with pytest.raises(UserError, match=r"holds tokens: give the --tokenizer"):
        prepare(dataclasses.replace(other, tokenizer=""), quiet)


# Duplicates.


def test_equal_documents_are_removed_and_held_out_ones_stay(with_tokenizer, tmp_path):
    documents = list(corpus_documents())
    for name, part in (("train", documents + documents[:30]), ("val", documents[:10])):
        (tmp_path / f"{name}.jsonl.zst").write_bytes(encode_jsonl_zst(part))
    config = dataclasses.replace(with_tokenizer, source=str(tmp_path / "*.zst"))
    counted = json.loads((prepare(config, quiet) / "manifest.json").read_text())
    assert sum(entry["duplicates"] for entry in counted["statistics"]["train"].values()) == 30
    assert counted["duplicates"] == {}
    once = dataclasses.replace(config, remove_duplicates=True, data=str(tmp_path / "once"))
    found = json.loads((prepare(once, quiet) / "manifest.json").read_text())
    assert found["duplicates"] == {"equal": 40, "near": 0, "documents": 130}
    documents_of = {
        name: sum(entry["documents"] for entry in split["sources"].values())
        for name, split in found["splits"].items()
    }
    assert documents_of == {"train": 80, "validation": 10}


def test_nearly_equal_documents_are_removed(with_tokenizer, tmp_path):
    pytest.importorskip("rensa")
    generator = np.random.default_rng(0)
    words = np.array([f"word{n}" for n in range(5000)])
    texts = [" ".join(generator.choice(words, 200)) for _ in range(30)]
    near = [text.replace("word1", "another", 1) for text in texts[:12]]
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts + near))
    config = dataclasses.replace(
        with_tokenizer,
        source=str(source),
        near_duplicates=0.7,
        packing="single",
        sequence_length=1200,
        shard_bytes=1 << 20,
    )
    other = dataclasses.replace(config, data=str(tmp_path / "other"))
    found = json.loads((prepare(config, quiet) / "manifest.json").read_text())
    assert found["duplicates"] == {"equal": 0, "near": 12, "documents": 42}
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    found = json.loads((prepare(other, quiet) / "manifest.json").read_text())
    assert found["duplicates"]["near"] == 0


def test_a_dry_run_estimates_and_writes_nothing(with_tokenizer, corpus, tmp_path):
    said = []
    folder = prepare(dataclasses.replace(with_tokenizer, dry_run=True), said.append)
    assert not folder.exists()
    text = "\n".join(said)
    assert "documents  90\n" in text and "tokens" in text and "minutes with 1 workers" in text
    data = TokenData.open(prepare(with_tokenizer, quiet))
    counts = [s["sources"].values() for s in data.contents["splits"].values()]
    exact = sum(c["tokens"] + c["dropped_tokens"] for split in counts for c in split)
    assert f"tokens     {exact:,}" in text
    assert SEQUENCE_LENGTH == data.sequence_length


@pytest.mark.parametrize("name", ["a.parquet", "a.zip"])
def test_a_dry_run_knows_how_much_of_a_library_s_file_it_read(with_tokenizer, tmp_path, name):
    """More text than the sample: the rest is estimated from the share that was read."""
    texts = [f"{n}: " + "some words of a text " * 60 for n in range(4000)]
    if name == "a.parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet")
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / name)
    else:
        with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a.jsonl", "".join(json.dumps({"text": t}) + "\n" for t in texts))
    said = []
    config = dataclasses.replace(with_tokenizer, source=str(tmp_path / name), dry_run=True)
    prepare(config, said.append)
    (found,) = re.findall(r"documents  ([\d,]+)", "\n".join(said))
    assert 3000 < int(found.replace(",", "")) < 5000


def test_replies_of_a_conversation_are_learned_and_what_precedes_them_is_read(
    with_tokenizer, tmp_path
):
    source = tmp_path / "chats.jsonl"
    records = []
    for n in range(60):
        turns = [
            {"role": "system", "content": "Add."},
            {"role": "user", "content": f"{n} + 1?"},
            {"role": "assistant", "content": f"It is {n + 1}."},
            {"role": "user", "content": "And one more?"},
            {"role": "assistant", "content": f"Then {n + 2}."},
        ]
        if n % 2:  # ShareGPT's names
            names = {"user": "human", "assistant": "gpt", "system": "system"}
            turns = [{"from": names[t["role"]], "value": t["content"]} for t in turns]
        records.append({"conversation": {"messages": turns}})
    records.append({"conversation": {"messages": [{"role": "user", "content": "Hello?"}]}})
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = dataclasses.replace(
        with_tokenizer,
        source=str(source),
        chat_field="conversation.messages",
        packing="best_fit",
        document_mask=True,
        sequence_length=100,
        validation_fraction=0.3,
    )
    data = TokenData.open(prepare(config, quiet))
    first, second = (
        [f"{word} {n + k}." for n in range(60)] for k, word in ((1, "It is"), (2, "Then"))
    )
    by_split = []
    for split in data.splits:
        batch = everything(data, split)
        learned = data.tokenizer.decode(batch["tokens"][:, 1:][batch["loss_mask"] == 1])
        by_split.append({reply.strip() for reply in learned.split("<|endoftext|>") if reply})
        read = data.tokenizer.decode(batch["tokens"].ravel())
        assert "assistant: It is 3.\n\nuser: And one more?\n\nassistant: Then 4." in read or (
            "Then 4." not in by_split[-1]
        )
        # Everything of a reply's row position belongs to one document each.
        ids = batch["document_ids"]
        assert np.array_equal(
            np.diff(ids, axis=1) == 1, batch["tokens"][:, 1:] == data.end_of_text_id
        )
    assert set().union(*by_split) == {*first, *second}
    assert len(by_split) > 1 and not by_split[0] & by_split[1]
    for n in range(60):  # both replies of a conversation are in one split
        assert any({first[n], second[n]} <= replies for replies in by_split)


@pytest.mark.parametrize(
    "record, words",
    [
        ({"messages": "text"}, 'has no list of messages in "messages"'),
        ({"messages": [{"role": "user"}]}, 'has a message without "role" and "content"'),
        ({"messages": [{"role": "user", "content": 3}]}, "whose role or content is no string"),
    ],
)
def test_what_is_no_conversation_is_named(with_tokenizer, tmp_path, record, words):
    source = tmp_path / "chats.jsonl"
    source.write_text(json.dumps(record) + "\n")
    config = dataclasses.replace(with_tokenizer, source=str(source), chat_field="messages")
    with pytest.raises(UserError) as error:
        prepare(config, quiet)
    assert "chats.jsonl line 1" in str(error.value) and words in str(error.value)
