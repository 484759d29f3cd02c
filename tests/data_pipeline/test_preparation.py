import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import zstandard
from preparing import contents, quiet, work
from sample_corpus import SEQUENCE_LENGTH, corpus_documents

from data_pipeline.building import building
from data_pipeline.dataset import TokenData
from data_pipeline.documents import document_key, split_of
from data_pipeline.preparation import prepare
from data_pipeline.tokenizer import Tokenizer
from tfbig.errors import UserError


def test_every_text_is_there_once_in_its_split(data_folder):
    data = TokenData.open(data_folder)
    end = data.end_of_text_id
    documents = list(corpus_documents())
    found = {}
    for split in data.splits:
        rows = data.rows_in_order(split, np.arange(data.num_rows(split)))
        for index, source in enumerate(data.sources):
            stream = rows["tokens"][rows["source_index"] == index]
            # Across the shards of a source as within them: a row begins with the last one's end.
            assert np.array_equal(stream[1:, 0], stream[:-1, -1]) and stream[0, 0] == end
            labels = stream[:, 1:].ravel()
            texts = [
                data.tokenizer.decode(d) for d in np.split(labels, np.nonzero(labels == end)[0])
            ]
            texts = [text.removeprefix("<|endoftext|>") for text in texts]
            dropped = data._contents["splits"][split]["sources"][source]["dropped_tokens"]
            assert 0 <= dropped < SEQUENCE_LENGTH
            found[split, source] = texts
    for (split, source), texts in found.items():
        expected = {
            text
            for text, of in documents
            if of == source and split_of(document_key(text), 0.2, 0.0) == split
        }
        *whole, last = texts
        assert len(set(whole)) == len(whole) and set(whole) <= expected
        missing = expected - set(whole)
        # The tail that fills no row is shorter than a row; all else is there.
        assert sum(len(text) for text in missing) - len(last) < SEQUENCE_LENGTH * 20
        assert any(text.startswith(last) for text in missing) or not last
        assert len(missing) <= 3
    assert sum(len(texts) for texts in found.values()) > 80


def test_documents_are_shuffled_by_the_seed(prepare_config, tmp_path):
    def first_texts(config):
        data = TokenData.open(prepare(config, quiet))
        return data.tokenizer.decode(data.rows_in_order("train", np.arange(3))["tokens"].ravel())

    one = dataclasses.replace(prepare_config, data=str(tmp_path / "one"))
    two = dataclasses.replace(one, data=str(tmp_path / "two"), seed=1)
    assert first_texts(one) != first_texts(two)


def test_the_time_of_each_stage_is_said():
    from data_pipeline.account import seconds_line

    times = {name: [2.0, 1.5] for name in ("read", "encode", "write")}
    tokenized = {"a": {"seconds": times, "encoder": "gigatoken"}}
    tokenized["b"] = {"seconds": dict.fromkeys(times, 3.0), "encoder": "tiktoken"}  # as once stored
    line = seconds_line(tokenized, {"order": (None, {"seconds": [1, 0.5]})}, [{"seconds": [4, 2]}])
    assert "read 5.0 (4.5), encode 5.0 (4.5), write 5.0 (4.5), shuffle 1.0 (0.5)" in line
    assert "pack 4.0 (2.0), encoded by gigatoken, tiktoken" in line


def test_a_tokenizer_of_the_users_is_kept_as_it_is(prepare_config, data_folder, tmp_path):
    path = data_folder / "tokenizer.json"
    config = dataclasses.replace(prepare_config, tokenizer=str(path), vocab_size=4096)
    data = TokenData.open(prepare(config, quiet))
    assert data.tokenizer_sha256 == TokenData.open(data_folder).tokenizer_sha256
    assert data.vocab_size == 320
    prepare(config, quiet)
    retrained = dataclasses.replace(config, tokenizer="", vocab_size=320)
    with pytest.raises(UserError, match=r"tokenizer is '[0-9a-f]{64}' there and '' here"):
        prepare(retrained, quiet)


def test_the_manifest_says_what_went_in(data_folder, corpus):
    found = json.loads((data_folder / "manifest.json").read_text())
    (entry,) = found["inputs"]
    assert entry["path"] == str(corpus) and entry["documents"] == 90
    assert entry["bytes"] == corpus.stat().st_size
    of_splits = [split["sources"].values() for split in found["splits"].values()]
    assert sum(counts["documents"] for split in of_splits for counts in split) == 90
    assert found["mixture"] == [{"first_sample": 0, "weights": {"Github": 1.0, "Pile-CC": 1.0}}]
    assert str(data_folder) not in json.dumps(found)
    (store,) = found["stores"]
    assert [(part["split"], part["source"]) for part in store["parts"]] == [
        ("train", "Github"),
        ("train", "Pile-CC"),
        ("validation", "Github"),
        ("validation", "Pile-CC"),
    ]
    statistics = [entry for of_split in found["statistics"].values() for entry in of_split.values()]
    texts = [text.encode() for text, _ in corpus_documents()]
    assert sum(entry["bytes"] for entry in statistics) == sum(map(len, texts))
    assert sum(sum(entry["lengths"].values()) for entry in statistics) == 90


def test_what_is_complete_is_not_done_again(several, tmp_path, monkeypatch):
    from data_pipeline.tokenizing import ChunkTokenizer

    done, original = [], ChunkTokenizer.__call__

    def counted(self, item):
        if len(done) == 3 and stop:
            raise KeyboardInterrupt
        done.append(item)
        return original(self, item)

    monkeypatch.setattr(ChunkTokenizer, "__call__", counted)
    config, stop = dataclasses.replace(several, workers=1), True
    with pytest.raises(KeyboardInterrupt):
        prepare(config, quiet)
    stop = False
    first = list(done)
    # Another sequence length needs no new tokenizing; a file that changed does.
    (tmp_path / "several" / "notes.txt").write_text("another text")
    prepare(dataclasses.replace(config, sequence_length=32), quiet)
    again = done[len(first) :]
    assert not set(first) & set(again) and len(again) >= 5


def test_what_is_tokenized_serves_another_plan_though_its_parts_are_gone(several, tmp_path):
    """Parts of large files are removed once all is tokenized, and what follows may fail."""
    config = dataclasses.replace(several, workers=1, sequence_length=8000, max_bad_fraction=0.1)
    with pytest.raises(UserError, match="no row of --sequence_length"):
        prepare(config, quiet)
    assert not list((tmp_path / "data" / "work").glob("split-*.zst"))
    # Each of these gives every chunk another name: their text is read again.
    for changes in ({"seed": 3}, {"tokenizer": "", "vocab_size": 300}):
        changed = dataclasses.replace(config, **changes)
        with pytest.raises(UserError, match="no row of --sequence_length"):
            prepare(changed, quiet)
    changed = dataclasses.replace(config, validation_fraction=0.3, sequence_length=16)
    fresh = dataclasses.replace(changed, data=str(tmp_path / "fresh"))
    assert contents(prepare(changed, quiet)) == contents(prepare(fresh, quiet))


def test_hosts_may_differ_in_workers_and_in_the_folders_name(several, tmp_path):
    config = dataclasses.replace(several, workers=1, sequence_length=8000, chunk_bytes=1 << 30)
    with pytest.raises(UserError, match="no row of --sequence_length"):
        prepare(config, quiet)
    folder = tmp_path / "data"
    before = {path: path.stat().st_mtime_ns for path in (folder / "work/results").iterdir()}
    assert before
    with building(folder, (folder / "work/plan.json").read_bytes()):  # this one is at work
        other = dataclasses.replace(config, workers=5, data=f"{tmp_path}/./data")
        result = work(0, other)
    assert "no row of --sequence_length" in result.stderr, result.stderr
    after = {path: path.stat().st_mtime_ns for path in (folder / "work/results").iterdir()}
    assert after == before


def test_an_encoder_that_differs_somewhere_gives_the_same_bytes_in_any_order(
    several, tmp_path, monkeypatch
):
    """Each chunk is judged by itself: one that drops an encoder drops it for no other."""
    from data_pipeline import encoders
    from data_pipeline.work import WorkFolder

    # Differs on a tilde: in some chunks within what is compared, in others behind.
    def differing(tokenizer):
        library = encoders._library_backend(tokenizer)
        return lambda texts, threads, data: library(
            [text.replace("~", "-") for text in texts], threads, data
        )

    monkeypatch.setattr(encoders, "_gigatoken_backend", differing)
    monkeypatch.setattr(encoders, "_GATE_CHARACTERS", 100)
    source = tmp_path / "tildes"
    source.mkdir()
    for name, text in {
        "a": "~ " * 300,
        "b": "word " * 300 + "~",
        "c": "~",
        "d": "x" * 999 + "~",
    }.items():
        line = json.dumps({"text": f"{name} {text}"}) + "\n"
        (source / f"{name}.jsonl").write_text(line * 2)
    config = dataclasses.replace(
        several, source=str(source), workers=1, validation_fraction=0, chunk_bytes=100
    )
    found, original = [], WorkFolder.run
    for first in ("a", "b"):
        with monkeypatch.context() as patch:

            def run(self, items, perform, first=first):
                for item in sorted(items, reverse=first == "b"):
                    original(self, [item], perform)
                return original(self, items, perform)

            patch.setattr(WorkFolder, "run", run)
            said = []
            folder = prepare(dataclasses.replace(config, data=str(tmp_path / first)), said.append)
            found.append(contents(folder))
        assert any("gigatoken's ids differ" in text for text in said)
    assert found[0] == found[1]


HUGE = """
import resource, sys
from data_pipeline.preparation import prepare
from tfbig.config import PrepareConfig

prepare(eval(sys.argv[1]), say=lambda text: None)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.skipif(
    "TFBIG_HUGE" not in os.environ, reason="takes 40 s and 6 GB of memory: set TFBIG_HUGE=1"
)
def test_a_document_of_500_megabytes_is_one_document(prepare_config, data_folder, tmp_path):
    """In seconds, at some twelve times its size, with the ids of its parts."""
    tokenizer = Tokenizer.load(data_folder / "tokenizer.json")
    # No token crosses from one block to the next: a space behind a word begins a new piece.
    block = "".join(f" word {k} caf\u00e9 \u65e5\u672c x{k * k}" for k in range(2000))
    count = 500_000_000 // len(block.encode()) + 1
    path = tmp_path / "huge.jsonl.zst"
    with zstandard.open(path, "wb") as file:
        file.write(b'{"text": "')
        for _ in range(count):
            file.write(block.encode())
        file.write(b'"}\n')
    config = dataclasses.replace(
        prepare_config,
        source=str(path),
        tokenizer=str(data_folder / "tokenizer.json"),
        sequence_length=2048,
        validation_fraction=0.0,
        shard_bytes=1 << 30,
        workers=1,
    )
    done = subprocess.run(
        [sys.executable, "-c", HUGE, repr(config)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 9000  # megabytes
    (counts,) = TokenData.open(config.data).contents["statistics"]["train"].values()
    assert counts["documents"] == 1 and counts["bytes"] == count * len(block.encode())
    assert counts["tokens"] == count * len(tokenizer.encode(block)) + 1


def test_a_worker_that_dies_is_done_without(several, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("data_pipeline.preparation.sys.executable", "/bin/false")
    folder = prepare(dataclasses.replace(several, workers=3), said.append)
    monkeypatch.undo()
    one = dataclasses.replace(several, data=str(tmp_path / "one"), workers=1)
    assert contents(folder) == contents(prepare(one, quiet))


def test_text_is_split_alike_by_size_and_by_line(several, tmp_path):
    """Large files, compressed or not, are cut into pieces; every line is in one of them."""
    from data_pipeline.documents import ReadCounts
    from data_pipeline.input_files import find_inputs
    from data_pipeline.plan import Plan
    from data_pipeline.reading import Piece, PieceReader
    from data_pipeline.splitting import split_input
    from data_pipeline.work import WorkFolder

    inputs = find_inputs(several.source)
    plan = Plan({}, dataclasses.replace(several, chunk_bytes=700), inputs)
    items = plan.large_inputs()
    assert len(items) == 4
    work_folder = WorkFolder(tmp_path)
    for item, number in items.items():
        pieces = [Piece(**p) for p in split_input(plan, item, tmp_path, work_folder)["pieces"]]
        assert len(pieces) > 2
        whole = [d.text for d in PieceReader(inputs[number], Piece(number), ReadCounts())]
        first, found = 1, []
        for piece in pieces:
            assert piece.first_record == first
            counts = ReadCounts()
            reader = PieceReader(inputs[number], piece, counts, str(tmp_path))
            found += [d.text for d in reader]
            first += counts.documents
        assert found == whole
