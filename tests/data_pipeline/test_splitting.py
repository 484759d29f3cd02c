"""Large inputs of every form in pieces: what is in the pieces is what is in the whole."""

import dataclasses
import gzip
import io
import json
import tarfile
import zipfile
from hashlib import sha256

import pytest
import zstandard
from sample_corpus import corpus_documents

from data_pipeline.documents import ReadCounts
from data_pipeline.input_files import find_inputs
from data_pipeline.plan import Plan
from data_pipeline.preparation import prepare
from data_pipeline.reading import Piece, PieceReader
from data_pipeline.splitting import split_input
from data_pipeline.work import WorkFolder
from tfbig.config import PrepareConfig
from tfbig.errors import UserError

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


def zst(data):
    return zstandard.ZstdCompressor().compress(data)


FILES = {
    "a.jsonl.zst": (zst(lines(TEXTS)), True),
    "a.json.gz": (gzip.compress(b"\xef\xbb\xbf\n" + lines(TEXTS)), True),
    "a.json": (lines(TEXTS), True),
    "array.json.gz": (gzip.compress(json.dumps([{"text": t} for t in TEXTS]).encode()), False),
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


@pytest.mark.parametrize("name", ["a.tar.zst", "a.tar", "a.dat", "a.json.gz"])
def test_a_large_file_that_is_cut_short_is_named(tmp_path, name):
    data, _ = FILES[name]
    (tmp_path / name).write_bytes(data[: len(data) * 2 // 3])
    (item,) = find_inputs(str(tmp_path / name))
    plan = Plan({}, PrepareConfig(chunk_bytes=len(data) // 5), [item])
    with pytest.raises(UserError, match=rf"{name}.* is (cut short|no intact)"):
        in_pieces(plan, tmp_path)


def test_chunks_of_an_archive_give_the_folder_of_the_whole(tmp_path, data_folder):
    (tmp_path / "a.tar.zst").write_bytes(FILES["a.tar.zst"][0])
    config = PrepareConfig(
        source=str(tmp_path / "a.tar.zst"),
        data=str(tmp_path / "whole"),
        tokenizer=str(data_folder / "tokenizer.json"),
        sequence_length=16,
        validation_fraction=0.2,
        max_bad_fraction=0.5,
        workers=1,
    )
    small = dataclasses.replace(config, data=str(tmp_path / "small"), chunk_bytes=400)
    whole, pieces = (prepare(c, lambda text: None) for c in (config, small))
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in (whole, pieces)]
    assert manifests[0] == manifests[1]
    for shard in whole.glob("*.tfrecord-*"):
        assert (pieces / shard.name).read_bytes() == shard.read_bytes()
