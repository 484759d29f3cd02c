"""Large inputs of every form in pieces: what is in the pieces is what is in the whole."""

import dataclasses
import gzip
import io
import json
import tarfile
import zipfile
from hashlib import sha256

import numpy as np
import pytest
import zstandard
from sample_corpus import corpus_documents

from data_pipeline.documents import ReadCounts
from data_pipeline.input_files import find_inputs
from data_pipeline.plan import Plan
from data_pipeline.preparation import prepare
from data_pipeline.reading import Piece, PieceReader
from data_pipeline.splitting import split_input
from data_pipeline.token_sources import read_token_documents
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.work import WorkFolder
from tfbig.config import PrepareConfig
from tfbig.errors import UserError

END = -1  # stands for end-of-text
TEXTS = [text for text, _ in corpus_documents()]


def lines(texts):
    return "".join(
        json.dumps({"text": text} if number % 9 else {"no": text}) + "\n"
        for number, text in enumerate(texts)
    ).encode()


def archive_members():
    """Lines, texts, a compressed member, one that is longer than a piece, and one that is empty."""
    yield "a/first.jsonl", lines(TEXTS[:30])
    yield "notes.txt", TEXTS[30].encode()
    yield "long/" + "name" * 60 + ".jsonl.gz", gzip.compress(lines(TEXTS[31:60]))
    yield "b.json", lines(TEXTS[60:70])
    yield "empty.jsonl", b""
    for number, text in enumerate(TEXTS[70:]):
        yield f"{number}.txt", text.encode()


def tar():
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, data in archive_members():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        archive.addfile(tarfile.TarInfo("empty"))
    return file.getvalue()


def zip_archive():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("folder/", b"")
        for name, data in archive_members():
            archive.writestr(name, data)
    return file.getvalue()


def lengths():
    return b"".join(b"%016d" % len(text.encode()) + text.encode() for text in TEXTS)


def array(indent):
    return json.dumps([{"text": text} for text in TEXTS], indent=indent).encode()


def zst(data):
    return zstandard.ZstdCompressor().compress(data)


FILES = {
    "a.jsonl.zst": (zst(lines(TEXTS)), True),
    "a.json.gz": (gzip.compress(b"\xef\xbb\xbf\n" + lines(TEXTS)), True),
    "a.json": (lines(TEXTS), True),
    "lists.json": (b"".join(json.dumps(t).encode() + b"\n" for t in [*TEXTS, ["[1", "]"]]), True),
    "array.json": (b"\xef\xbb\xbf" + array(2) + b"\n", True),
    "array.json.gz": (gzip.compress(array(None)), True),
    "a.tar.zst": (zst(tar()), True),
    "a.tgz": (gzip.compress(tar()), True),
    "a.tar": (tar(), True),
    "a.dat": (lengths(), True),
    "a.dat.zst": (zst(lengths()), True),
    "a.zip": (zip_archive(), True),
}


def in_pieces(plan, folder):
    """Returns the pieces of the only input and its digest, as the splitting stage finds it."""
    items = plan.large_inputs()
    results = {n: split_input(plan, item, folder, WorkFolder(folder)) for item, n in items.items()}
    pieces = [piece for chunk in plan.chunks(results) for piece in chunk]
    return pieces, results[0]["sha256"] if results else ""


@pytest.mark.parametrize("name", FILES)
def test_pieces_hold_what_the_whole_holds(tmp_path, name):
    data, is_split = FILES[name]
    (tmp_path / name).write_bytes(data)
    (item,) = find_inputs(str(tmp_path / name))
    whole, counts = ReadCounts(1.0), ReadCounts(1.0)
    expected = list(PieceReader(item, Piece(0), whole))
    assert len(expected) > 60
    plan = Plan({}, PrepareConfig(chunk_bytes=len(data) // 5), [item])
    pieces, digest = in_pieces(plan, tmp_path)
    assert len(pieces) > 2 if is_split else pieces == [Piece(0)]
    found = []
    for piece in pieces:
        reader = PieceReader(item, piece, counts, str(tmp_path))
        found += reader
        digest = digest or reader.sha256
        assert reader.num_bytes
    assert found == expected
    assert counts.bad_records == whole.bad_records and len(whole.bad_records) != len(expected)
    assert digest == sha256(data).hexdigest()


@pytest.mark.parametrize("name", ["a.tar.zst", "a.tar", "a.dat", "a.json.gz", "array.json"])
def test_a_large_file_that_is_cut_short_is_named(tmp_path, name):
    data, _ = FILES[name]
    (tmp_path / name).write_bytes(data[: len(data) * 2 // 3])
    (item,) = find_inputs(str(tmp_path / name))
    plan = Plan({}, PrepareConfig(chunk_bytes=len(data) // 5), [item])
    with pytest.raises(UserError, match=rf"{name}.* is (cut short|no intact)"):
        in_pieces(plan, tmp_path)


def token_documents(item, pieces, tokenizer):
    """Returns the documents and how many are empty, with the ids of each batch taken apart."""
    found, counts = [], ReadCounts()
    for piece in pieces:
        for batch in read_token_documents(item, piece, tokenizer, counts):
            stops = np.cumsum(batch.lengths)
            bounds = zip(stops - batch.lengths, stops, batch.digests.tolist(), strict=True)
            found += [(batch.ids[a:b].tolist(), digest) for a, b, digest in bounds]
    return found, counts.skipped["empty text"]


@pytest.mark.parametrize("last", [[], [5, 6], [END], [END, END]])
@pytest.mark.parametrize("tokens_of_a_piece", [1, 2, 3, 7, 40, 200])
def test_nanogpts_ids_are_cut_between_documents(tmp_path, data_folder, tokens_of_a_piece, last):
    tokenizer = Tokenizer.load(data_folder / "tokenizer.json")
    end = tokenizer.end_of_text_id
    documents = [[], [7], [8] * 90, [], [], *([n] * (n % 9) for n in range(60)), [9] * 30]
    ids = [token for document in documents for token in [*document, end]]
    ids += [end if token == END else token for token in last]
    np.array(ids, "<u2").tofile(tmp_path / "train.bin")
    (item,) = find_inputs(f"nanogpt:{tmp_path / 'train.bin'}")
    chunk_bytes = 8 * tokens_of_a_piece
    plan = Plan({}, PrepareConfig(chunk_bytes=chunk_bytes), [item])
    pieces = [piece for chunk in plan.chunks({}) for piece in chunk]
    is_cut = item.num_bytes > chunk_bytes
    assert len(pieces) == (-(-len(ids) // tokens_of_a_piece) if is_cut else 1)
    found = token_documents(item, pieces, tokenizer)
    assert found == token_documents(item, [Piece(0)], tokenizer)
    expected = [*documents, *([[]] * last.count(END)), *([last] if 5 in last else [])]
    assert [ids for ids, _ in found[0]] == [document for document in expected if document]
    assert found[1] == expected.count([])


def nanogpt(tokenizer):
    end = tokenizer.end_of_text_id
    ids = [token for text in TEXTS for token in [*tokenizer.encode(text), end]]
    return np.array(ids, "<u2").tobytes()


@pytest.mark.parametrize(
    ("name", "workers"), [("a.tar.zst", 1), ("array.json.gz", 2), ("nanogpt:a.bin", 2)]
)
def test_chunks_of_a_file_give_the_folder_of_the_whole(tmp_path, data_folder, name, workers):
    preset, _, file = name.rpartition(":")
    tokenizer = Tokenizer.load(data_folder / "tokenizer.json")
    data = FILES[name][0] if name in FILES else nanogpt(tokenizer)
    (tmp_path / file).write_bytes(data)
    config = PrepareConfig(
        source=f"{preset}:{tmp_path / file}".lstrip(":"),
        data=str(tmp_path / "whole"),
        tokenizer=str(data_folder / "tokenizer.json"),
        sequence_length=16,
        validation_fraction=0.2,
        max_bad_fraction=0.5,
        workers=1,
    )
    changes = {"data": str(tmp_path / "small"), "chunk_bytes": 400, "workers": workers}
    small = dataclasses.replace(config, **changes)
    whole, pieces = (prepare(c, lambda text: None) for c in (config, small))
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in (whole, pieces)]
    assert manifests[0] == manifests[1]
    for shard in whole.glob("*.tfrecord-*"):
        assert (pieces / shard.name).read_bytes() == shard.read_bytes()
