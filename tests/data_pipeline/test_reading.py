import bz2
import dataclasses
import gzip
import hashlib
import io
import json
import lzma
import os
import tarfile
import zipfile

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline import codecs
from data_pipeline.documents import Filters, ReadCounts, document_key, filtered, split_of
from data_pipeline.input_files import InputFile, RecordFormat, find_inputs
from data_pipeline.reading import Piece, PieceReader, read_documents
from data_pipeline.stdlib_corpus import encode_jsonl_zst, stdlib_corpus, stdlib_texts
from tfbig.errors import UserError


def read(path, may_be_bad=0.0):
    counts = ReadCounts(may_be_bad)
    return [(d.text, d.source) for d in read_documents(path, counts)], counts


def read_texts(path):
    return [text for text, _ in read(path)[0]]


def read_back(plain):
    return [(value["text"], value["meta"]["pile_set_name"]) for value in [json.loads(plain)]]


def write(path, data):
    path.write_bytes(data)
    return path


def line(text, source="Github"):
    return json.dumps({"text": text, "meta": {"pile_set_name": source}}).encode()


def zst(data, **options):
    return zstandard.ZstdCompressor(**options).compress(data)


DOCUMENTS = [
    ("eins\u2028zwei\x85drei\n\r\nvier", "Github"),
    ("x" * 700_000, "ArXiv"),
    ("é", "Github"),
]
TEXTS = [text for text, _ in DOCUMENTS]
LINES = b"".join(line(*document) + b"\n" for document in DOCUMENTS)


def test_what_is_written_is_read(tmp_path):
    data = encode_jsonl_zst(DOCUMENTS)
    frame = zstandard.get_frame_parameters(data)
    assert frame.has_checksum and frame.content_size > 700_000
    found, counts = read(write(tmp_path / "a.jsonl.zst", data))
    assert found == DOCUMENTS
    assert counts.documents == 3 and not counts.skipped and not counts.changed


@pytest.mark.parametrize(
    ("name", "encode"),
    [
        ("a.jsonl", bytes),
        ("a.ndjson", bytes),
        ("a.json", bytes),
        ("a.gz", gzip.compress),
        ("a.jsonl.gz", gzip.compress),
        ("a.json.gz", gzip.compress),
        ("a.jsonl.bz2", bz2.compress),
        ("a.jsonl.xz", lzma.compress),
        ("a.jsonl.zst", zst),
        ("a.json.zst", zst),
    ],
)
def test_every_compression_and_several_frames(tmp_path, name, encode):
    assert read(write(tmp_path / name, encode(LINES)))[0] == DOCUMENTS
    cut = LINES.index(b"\n") + 20  # frames need not end with lines
    data = encode(LINES[:cut]) + encode(LINES[cut:])
    assert read(write(tmp_path / name, data))[0] == DOCUMENTS


def test_a_json_file_may_be_one_array(tmp_path):
    records = [json.loads(part) for part in LINES.splitlines()] + ["a bare string"]
    data = b"\xef\xbb\xbf \n" + json.dumps(records).encode()
    found = [*DOCUMENTS, ("a bare string", "text")]
    assert read(write(tmp_path / "a.json", data))[0] == found
    assert read(write(tmp_path / "a.json.zst", zst(data)))[0] == found
    with pytest.raises(UserError, match=r"a\.json is cut short: its array has no end"):
        read(write(tmp_path / "a.json", data[:-5]))
    with pytest.raises(UserError, match=r"a\.json record 2 is not valid JSON"):
        read(write(tmp_path / "a.json", b'["one", {"text": two}, "three"]'))


def test_texts_with_their_length_before_them(tmp_path):
    """The DAT archives of lm_dataformat."""
    data = b"".join(b"%016d" % len(text.encode()) + text.encode() for text in TEXTS)
    assert read_texts(write(tmp_path / "a.dat.zst", zst(data))) == TEXTS
    with pytest.raises(UserError, match="cut short within record 3"):
        read(write(tmp_path / "a.dat.zst", zst(data[:-1])))
    with pytest.raises(UserError, match="record 1 does not begin with a length"):
        read(write(tmp_path / "a.dat.zst", zst(b"x" + data)))


def tar_of(members):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, data in members.items():
            information = tarfile.TarInfo(name)
            information.size = len(data)
            archive.addfile(information, io.BytesIO(data))
    return file.getvalue()


def test_archives(tmp_path):
    members = {"x/a.txt": b"one", "b.jsonl.zst": zst(LINES), "c": b"three", "d.jsonl": line("d")}
    texts = ["one", *TEXTS, "three", "d"]
    for name, encode in (
        ("a.tar", bytes),
        ("a.tar.zst", zst),
        ("a.tar.gz", gzip.compress),
        ("a.tgz", gzip.compress),
        ("a.jsonl.zst.tar", bytes),
    ):
        assert read_texts(write(tmp_path / name, encode(tar_of(members)))) == texts
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    assert read_texts(tmp_path / "a.zip") == texts
    with pytest.raises(UserError, match="an archive in an archive"):
        read(write(tmp_path / "a.tar", tar_of({"b.tar": b""})))
    whole = tar_of(members)
    for kept in (700, 1300, 1600):  # within a header, a member, and between members
        with pytest.raises(UserError, match=r"no intact tar|cut short"):
            read(write(tmp_path / "a.tar", whole[:kept]))
    with pytest.raises(UserError, match=r"a\.tar member b\.jsonl\.zst is cut short"):
        read(write(tmp_path / "a.tar", tar_of({"b.jsonl.zst": zst(LINES)[:-3]})))
    with pytest.raises(UserError, match="no intact zip"):
        read(write(tmp_path / "a.zip", b"PK"))
    with pytest.raises(UserError, match=r"a\.tar member b\.txt is not UTF-8 at byte 1"):
        read(write(tmp_path / "a.tar", tar_of({"b.txt": b"a\xff"})))


@given(
    st.lists(st.binary(max_size=6).map(lambda data: data.replace(b"\n", b"")), max_size=8),
    st.integers(1, 9),
)
def test_lines_are_the_same_however_the_file_is_read(lines, size):
    data = b"".join(part + b"\n" for part in lines)
    chunks = (data[k : k + size] for k in range(0, len(data), size))
    assert list(codecs.split_lines(chunks)) == lines


@pytest.mark.parametrize("kept", [1, 5, -1, -5])
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("suffix", ["zst", "gz"])
def test_a_file_cut_anywhere_is_an_error(tmp_path, kept, before, suffix):
    frame = zst(LINES) if suffix == "zst" else gzip.compress(LINES)
    path = write(tmp_path / f"a.jsonl.{suffix}", frame * before + frame[:kept])
    with pytest.raises(UserError, match=rf"a\.jsonl\.{suffix} is cut short"):
        read(path)


def test_a_file_without_checksum_cut_between_blocks_is_an_error(tmp_path):
    """The writer of lm_dataformat, which made the Pile, leaves checksum and size out."""
    compressor = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    data = compressor.compress(b"\n".join([line("a" * 1000)] * 9) + b"\n")
    data += compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    with pytest.raises(UserError, match="cut short"):
        read(write(tmp_path / "a.jsonl.zst", data))


@pytest.mark.parametrize("suffix", ["zst", "gz"])
def test_a_flipped_bit_is_an_error(tmp_path, suffix):
    plain = b"\n".join(line(f"some text {n * n}") for n in range(500))
    encode = gzip.compress if suffix == "gz" else lambda d: zst(d, write_checksum=True)
    data = bytearray(encode(plain))
    data[len(data) // 2] ^= 4
    path = write(tmp_path / f"a.jsonl.{suffix}", bytes(data))
    with pytest.raises(UserError, match=f"not intact {suffix} data|not valid JSON"):
        read(path)
    # However much is borne: what lies behind the damage is not known.
    with pytest.raises(UserError, match=f"not intact {suffix} data"):
        read(path, may_be_bad=0.5)


@pytest.mark.parametrize(
    "name", ["jsonl.zst", "jsonl.gz", "jsonl", "json", "txt", "tar", "zip", "parquet"]
)
def test_a_pointer_to_the_file_is_named_as_such(tmp_path, name):
    if name == "parquet":
        pytest.importorskip("pyarrow")
    data = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    path = write(tmp_path / f"a.{name}", data)
    with pytest.raises(UserError, match="Git LFS pointer"):
        read(path)


def test_a_flipped_bit_without_checksum_is_an_error_or_other_text(tmp_path):
    """The Pile's frames have no checksum: what breaks neither stream nor JSON goes unseen.

    Only SHA256SUMS finds it then (test_preparation.py).
    """
    plain = line("".join(chr(33 + k * k * 7 % 90) for k in range(999)).replace("\\", "_")) + b"\n"
    data = zst(plain, write_checksum=False)
    outcomes = set()
    for place in range(8, len(data), 13):
        flipped = bytearray(data)
        flipped[place] ^= 1
        path = write(tmp_path / "a.jsonl.zst", bytes(flipped))
        try:
            outcomes.add("text" if read(path)[0] == read_back(plain) else "other text")
        except UserError as error:
            outcomes.add("an error")
            assert "a.jsonl.zst" in str(error)
    assert outcomes == {"an error", "other text"}


def test_byte_order_mark_crlf_blank_lines_and_a_missing_last_newline_are_no_text(tmp_path):
    data = b"\xef\xbb\xbf" + line("a") + b"\r\n\r\n\n" + line("b\\u0000")
    assert read_texts(write(tmp_path / "a.jsonl", data)) == ["a", "b\\u0000"]


def test_an_escaped_nul_is_text(tmp_path):
    assert read_texts(write(tmp_path / "a.jsonl", b'{"text": "a\\u0000b"}')) == ["a\0b"]


def test_records_without_a_set_name_are_of_one_source(tmp_path):
    data = b'{"text": "a"}\n{"text": "b", "meta": {}}\n{"text": "c", "meta": null}\n'
    assert {source for _, source in read(write(tmp_path / "a.jsonl", data))[0]} == {"text"}


def test_a_text_may_be_a_list_of_parts(tmp_path):
    """As lm_dataformat joins them."""
    assert read_texts(write(tmp_path / "a.jsonl", b'{"text": ["a", "b"]}')) == ["a\n\nb"]


def test_lone_surrogates_and_empty_texts_are_counted(tmp_path):
    data = b'{"text": "a\\ud800b"}\n{"text": ""}\n{"text": "\\ud83d\\ude42"}\n'
    found, counts = read(write(tmp_path / "a.jsonl", data))
    assert [text for text, _ in found] == ["a\ufffdb", "\N{SLIGHTLY SMILING FACE}"]
    assert sum(counts.changed.values()) == 1 and sum(counts.skipped.values()) == 1
    assert counts.documents == 2


BAD_RECORDS = [
    (b'{"text": 5}', "a text that is int, not a string"),
    (b'{"text": null}', "a text that is NoneType"),
    (b'{"text": ["a", 5]}', "a text that is list"),
    (b'{"body": "a"}', 'no field "text"'),
    (b'["a"]', 'no field "text"'),
    (b'{"text": "a', "not valid JSON"),
    (b'{"text": "a\x00b"}', "not valid JSON"),
    (b'{"text": "\xff"}', "not valid JSON"),
    (b"[" * 100_000, "not valid JSON"),
]


@pytest.mark.parametrize(("record", "problem"), BAD_RECORDS)
def test_an_unfit_record_is_named_by_file_and_line(tmp_path, record, problem):
    path = write(tmp_path / "a.jsonl", line("fine") + b"\n" + record + b"\n")
    with pytest.raises(UserError, match=r"a\.jsonl line 2") as caught:
        read(path)
    assert problem in str(caught.value) and "\n" not in str(caught.value)


def test_unfit_records_that_are_borne_are_counted_by_reason_and_listed(tmp_path):
    records = [line("fine"), *(record for record, _ in BAD_RECORDS), line("fine too")]
    path = write(tmp_path / "a.jsonl", b"\n".join(records))
    found, counts = read(path, may_be_bad=0.9)
    assert [text for text, _ in found] == ["fine", "fine too"]
    assert counts.bad.total() == len(BAD_RECORDS) == len(counts.bad_records)
    assert counts.bad["is not valid JSON"] == 4
    for number, ((name, place, reason), (_, problem)) in enumerate(
        zip(counts.bad_records, BAD_RECORDS, strict=True), 2
    ):
        assert (name, place) == (str(path), f"line {number}") and problem in reason


def test_hopeless_input_is_given_up_early(tmp_path):
    path = write(tmp_path / "a.jsonl", b'{"body": "a"}\n' * 5000)
    with pytest.raises(UserError, match="1,000 of 1,000 records so far: is it the right"):
        read(path, may_be_bad=0.1)


def test_a_text_file_is_one_document(tmp_path):
    assert read(write(tmp_path / "a.txt", b"\xef\xbb\xbfone\ntwo"))[0] == [("one\ntwo", "text")]
    with pytest.raises(UserError, match="not UTF-8 at byte 3"):
        read(write(tmp_path / "b.txt", b"one\xff"))
    with pytest.raises(UserError, match="holds NUL bytes"):
        read(write(tmp_path / "c.txt", b"\x7fELF\0"))


def test_a_huge_document_is_one_document(tmp_path):
    text = "words and words " * 1_500_000  # 24 MB in one line
    found = read_texts(write(tmp_path / "a.jsonl.zst", zst(line(text), level=1)))
    assert found == [text]


def test_prompts_and_completions(tmp_path):
    data = b'{"q": "why?", "a": {"text": "because"}}\n{"q": "", "a": {"text": "x"}}\n{"q": "y"}'
    item = InputFile(
        str(write(tmp_path / "a.jsonl", data)),
        "a.jsonl",
        format=RecordFormat(prompt="q", completion="a.text"),
    )
    counts = ReadCounts(1.0)
    found = [(d.prompt, d.text) for d in PieceReader(item, Piece(0), counts)]
    assert found == [("why?", "because"), ("", "x")]
    assert counts.bad == {'has no field "a.text"': 1}


def test_filters_count_what_they_leave_out(tmp_path):
    path = write(tmp_path / "a.jsonl", b"\n".join([line("abc"), line("a"), line("abcd", "ArXiv")]))
    counts = ReadCounts()
    filters = Filters(min_characters=2, excluded_sources=("ArXiv",))
    assert [d.text for d in filtered(read_documents(path, counts), filters, counts)] == ["abc"]
    assert counts.documents == 1 and counts.skipped.total() == 2
    filters = Filters(max_characters=3)
    counts = ReadCounts()
    kept = [d.text for d in filtered(read_documents(path, counts), filters, counts)]
    assert kept == ["abc", "a"]


# Presets: which field names the source.


@pytest.mark.parametrize(
    ("preset", "record", "source"),
    [
        ("pile", {"meta": {"pile_set_name": "Bibliotik"}}, "Books3"),
        ("dolma", {"source": "reddit", "id": "1"}, "reddit"),
        ("common_pile", {"source": "arxiv"}, "arxiv"),
        ("redpajama", {"meta": {"source": "github"}}, "github"),
        ("slimpajama", {"meta": {"redpajama_set_name": "RedPajamaC4"}}, "RedPajamaC4"),
        ("fineweb", {"dump": "CC"}, "fineweb"),
        ("c4", {"url": "x"}, "c4"),
    ],
)
def test_presets_name_the_source(tmp_path, preset, record, source):
    write(tmp_path / "a.jsonl", json.dumps({"text": "a", **record}).encode())
    (item,) = find_inputs(f"{preset}:{tmp_path}")
    assert [d.source for d in read_documents(item, ReadCounts())] == [source]
    (item,) = find_inputs(f"{preset}:{tmp_path}", RecordFormat("", "", "mine"))
    assert [d.source for d in read_documents(item, ReadCounts())] == ["mine"]


def test_a_source_tree(tmp_path):
    for name, data in (("a.py", b"x = 1"), ("sub/b.c", b"int x;"), (".git/config", b"no")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, data)
    inputs = find_inputs(f"tree:{tmp_path}", RecordFormat("", "", "my code"))
    found = [(d.text, d.source) for item in inputs for d in read_documents(item, ReadCounts())]
    assert found == [("x = 1", "my code"), ("int x;", "my code")]


def test_the_piles_own_splits(tmp_path):
    (tmp_path / "train").mkdir()
    for name in ("train/00.jsonl", "train/01.jsonl", "val.jsonl", "test.jsonl"):
        write(tmp_path / name, line(name))
    found = {item.name[len(str(tmp_path)) + 1 :]: item.split for item in find_inputs(str(tmp_path))}
    assert found == {
        "train/00.jsonl": "train",
        "train/01.jsonl": "train",
        "val.jsonl": "validation",
        "test.jsonl": "test",
    }
    assert {item.split for item in find_inputs(f"{tmp_path}/train")} == {""}


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": ["a", None, "c", "d"], "id": [1, 2, 3, 4]})
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, path, row_group_size=2)
    (item,) = find_inputs(f"fineweb:{path}")
    counts = ReadCounts(1.0)
    found = [(d.text, d.source) for d in PieceReader(item, Piece(0), counts)]
    assert found == [("a", "fineweb"), ("c", "fineweb"), ("d", "fineweb")]
    assert counts.bad_records[0][1] == "row 2"
    from data_pipeline.parquet_source import row_group_ranges

    assert row_group_ranges(item, 1) == [(0, 1), (1, 2)]
    second = [d.text for d in PieceReader(item, Piece(0, 1, 2), ReadCounts())]
    assert second == ["c", "d"]
    (item,) = find_inputs(f"fineweb:{path}", RecordFormat("body", "", ""))
    with pytest.raises(UserError, match='no column "body"; it has text, id'):
        list(PieceReader(item, Piece(0), ReadCounts()))
    write(path, path.read_bytes()[:-20])
    with pytest.raises(UserError, match="no intact parquet"):
        list(PieceReader(item, Piece(0), ReadCounts()))


def test_remote_paths_are_read_through_tensorflow():
    tf = pytest.importorskip("tensorflow")
    tf.io.gfile.makedirs("ram://bucket/b")
    for name in ("a.jsonl", "b/c.jsonl.gz", "b/notes.md"):
        data = LINES if name == "a.jsonl" else gzip.compress(line("c"))
        with tf.io.gfile.GFile(f"ram://bucket/{name}", "wb") as file:
            file.write(data)
    inputs = find_inputs("ram://bucket")
    assert [item.name for item in inputs] == ["ram://bucket/a.jsonl", "ram://bucket/b/c.jsonl.gz"]
    assert inputs[0].num_bytes == len(LINES)
    assert [d.text for item in inputs for d in read_documents(item, ReadCounts())] == [*TEXTS, "c"]
    part = PieceReader(inputs[0], Piece(0, LINES.index(b"\n") + 1, -1), ReadCounts())
    assert [d.text for d in part] == TEXTS[1:]
    assert [item.name for item in find_inputs("ram://bucket/b/*.gz")] == [inputs[1].name]
    with pytest.raises(UserError, match=r"names no file|cannot list"):
        find_inputs("ram://nothing/*.jsonl")
    with pytest.raises(UserError, match="cannot read ram://nothing/a"):
        list(read_documents(InputFile("ram://nothing/a.jsonl", "a"), ReadCounts()))


@pytest.mark.parametrize("name", ["a.parquet", "a.zip"])
def test_files_that_a_library_reads_may_be_remote(tmp_path, name):
    tf = pytest.importorskip("tensorflow")
    if name == "a.parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet")
        table = pyarrow.table({"text": [f"text {n}" for n in range(5000)]})
        pyarrow.parquet.write_table(table, tmp_path / name, row_group_size=1000)
    else:
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for n in range(5000):
                archive.writestr(f"{n}.txt", f"text {n}")
    data = (tmp_path / name).read_bytes()
    tf.io.gfile.makedirs("ram://archives")
    with tf.io.gfile.GFile(f"ram://archives/{name}", "wb") as file:
        file.write(data)
    (item,) = find_inputs(f"fineweb:ram://archives/{name}")
    for piece in (Piece(0), Piece(0, 0, 2)):
        (local,) = find_inputs(f"fineweb:{tmp_path / name}")
        expected, found = PieceReader(local, piece, ReadCounts()), None
        found = PieceReader(item, piece, ReadCounts())
        assert list(found) == list(expected) and found.num_bytes
        assert found.sha256 == expected.sha256 == hashlib.sha256(data).hexdigest()
    with tf.io.gfile.GFile(f"ram://archives/{name}", "wb") as file:
        file.write(data[:-20])
    with pytest.raises(UserError, match=r"ram://archives/a.* is no intact"):
        list(PieceReader(item, Piece(0), ReadCounts()))
    missing = dataclasses.replace(item, path=f"ram://archives/none/{name}")
    with pytest.raises(UserError, match="cannot read ram://archives/none/a"):
        list(PieceReader(missing, Piece(0), ReadCounts()))


def test_how_far_a_file_is_read_that_a_library_reads(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    texts = [f"text {n} " * 50 for n in range(4000)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.jsonl", b"\n".join(line(text) for text in texts))
    for name in ("a.parquet", "a.zip"):
        (item,) = find_inputs(f"fineweb:{tmp_path / name}")
        reader = PieceReader(item, Piece(0), ReadCounts())
        documents = iter(reader)
        for _ in range(len(texts) // 2):
            next(documents)
        assert 0.4 * item.num_bytes < reader.num_bytes < 0.65 * item.num_bytes
        assert len(list(documents)) == len(texts) // 2
        assert 0.95 * item.num_bytes < reader.num_bytes <= item.num_bytes


def test_tfds_datasets(tmp_path, monkeypatch):
    tfds = pytest.importorskip("tensorflow_datasets")
    pytest.importorskip("tensorflow")

    class SmallText(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, manager):
            return {"train": self._generate_examples(7), "test": self._generate_examples(2)}

        def _generate_examples(self, count):
            for number in range(count):
                yield number, {"text": f"text {number}"}

    original = tfds.builder
    monkeypatch.setattr(tfds, "builder", lambda name: original(name, data_dir=tmp_path))
    with pytest.raises(UserError, match="is not prepared in"):
        find_inputs("tfds:small_text")
    with pytest.raises(UserError, match="--source=tfds:no_such"):
        find_inputs("tfds:no_such")
    SmallText(data_dir=tmp_path).download_and_prepare()
    test, train = find_inputs("tfds:small_text")
    assert (test.split, train.split) == ("test", "train")
    reader = PieceReader(train, Piece(0), ReadCounts())
    documents = [next(iterator := iter(reader))]
    assert reader.num_bytes == train.num_bytes // 7
    documents += iterator
    assert reader.num_bytes == train.num_bytes
    assert sorted(d.text for d in documents) == [f"text {n}" for n in range(7)]
    assert {d.source for d in documents} == {"small_text"}
    from data_pipeline.tfds_source import example_ranges

    ranges = example_ranges(train, max(1, train.num_bytes // 3))
    parts = [d.text for a, b in ranges for d in PieceReader(train, Piece(0, a, b), ReadCounts())]
    assert len(ranges) > 1 and parts == [d.text for d in documents]
    with pytest.raises(UserError, match='no feature "body"; it has text'):
        find_inputs("tfds:small_text", RecordFormat("body", "", ""))


def test_paths_folders_globs_and_lists(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.jsonl", "a.jsonl.zst", "sub/c.txt", "notes.md"):
        write(tmp_path / name, b"")
    names = [item.path[len(str(tmp_path)) + 1 :] for item in find_inputs(str(tmp_path))]
    assert names == ["a.jsonl.zst", "b.jsonl", "sub/c.txt"]
    both = find_inputs(f"{tmp_path / '*.jsonl*'}, dolma:{tmp_path / 'sub'}")
    assert [item.path[len(str(tmp_path)) + 1 :] for item in both] == names
    assert both[-1].format.source == "source"
    with pytest.raises(UserError, match=r"names .*b\.jsonl twice"):
        find_inputs(f"{tmp_path / 'b.jsonl'},{tmp_path / '*.jsonl'}")
    for missing in ("none.jsonl", "*.txt"):
        with pytest.raises(UserError, match="names no file"):
            find_inputs(str(tmp_path / missing))
    with pytest.raises(UserError, match=r"notes\.md: only"):
        find_inputs(str(tmp_path / "notes.md"))
    with pytest.raises(UserError, match=r"no preset 'doma'. Did you mean dolma\?"):
        find_inputs(f"doma:{tmp_path}")


def test_a_text_has_one_split_and_the_shares_hold():
    keys = [document_key(str(number)) for number in range(4000)]
    splits = [split_of(key, 0.1, 0.2) for key in keys]
    assert 320 < splits.count("validation") < 480 and 680 < splits.count("test") < 920
    assert splits == [split_of(document_key(str(number)), 0.1, 0.2) for number in range(4000)]
    # A larger share only adds documents: nothing held out before is trained on.
    wider = [split_of(key, 0.15, 0) for key in keys]
    assert all(w == "validation" for s, w in zip(splits, wider, strict=True) if s == "validation")
    assert {split_of(key, 0.0, 0.0) for key in keys} == {"train"}


def test_the_library_is_read_in_order_and_without_what_is_not_its_source(tmp_path):
    for name in ("b.py", "a/x.py", "site-packages/no.py", "a/tests/no.py", "test/no.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / name, name.encode())
    for name in ("lib2to3/tests/no.py", "idlelib/idle_test/no.py", "a/__pycache__/no.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / name, name.encode())
    write(tmp_path / "sitecustomize.py", b"no")
    write(tmp_path / "data.txt", b"no")
    write(tmp_path / "latin.py", b"# -*- coding: latin-1 -*-\r\n# \xe9")
    write(tmp_path / "broken.py", b"# \xe9")
    assert list(stdlib_texts(tmp_path)) == ["b.py", "# -*- coding: latin-1 -*-\n# é", "a/x.py"]
    with pytest.raises(UserError, match=r"holds no \.py files"):
        list(stdlib_texts(tmp_path / "site-packages" / "nothing"))


def test_the_running_pythons_library_becomes_a_corpus(tmp_path):
    corpus = stdlib_corpus(0.05, 0.0)
    assert list(corpus) == ["corpus/train.jsonl.zst", "corpus/validation.jsonl.zst"]
    for name, data in corpus.items():
        path = write(tmp_path / name.replace("/", "_"), data)
        documents = list(read_documents(path, ReadCounts()))
        assert documents and {d.source for d in documents} == {"Python stdlib"}
        splits = {split_of(d.digest.key, 0.05, 0.0) for d in documents}
        assert splits == {name[7:].split(".")[0]}


def test_links_and_pipes_in_a_folder(tmp_path):
    write(tmp_path / "a.jsonl", line("a"))
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "up").symlink_to("..")  # it would be gone through for ever
    assert [item.name for item in find_inputs(str(tmp_path))] == [f"{tmp_path}/a.jsonl"]
    (tmp_path / "b.jsonl").symlink_to("none.jsonl")
    with pytest.raises(UserError, match=r"b\.jsonl is neither a file nor a link to one"):
        find_inputs(str(tmp_path))
    (tmp_path / "b.jsonl").unlink()
    os.mkfifo(tmp_path / "c.jsonl")
    with pytest.raises(UserError, match=r"c\.jsonl is neither a file nor a link to one"):
        find_inputs(str(tmp_path))


def test_one_file_by_two_names_is_named_twice(tmp_path, monkeypatch):
    write(tmp_path / "a.jsonl", line("a"))
    monkeypatch.chdir(tmp_path)
    for source in ("a.jsonl,a.jsonl", "a.jsonl,./a.jsonl", f"a.jsonl,{tmp_path}"):
        with pytest.raises(UserError, match="twice"):
            find_inputs(source)
