import json

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline import sources
from data_pipeline.sources import (
    ReadCounts,
    document_key,
    encode_jsonl_zst,
    find_inputs,
    read_documents,
    split_of,
    stdlib_texts,
    write_stdlib_corpus,
)
from tfbig.errors import UserError


def read(path):
    counts = ReadCounts()
    return [(d.text, d.source) for d in read_documents(path, counts)], counts


def write(path, data):
    path.write_bytes(data)
    return path


def line(text, source="Github"):
    return json.dumps({"text": text, "meta": {"pile_set_name": source}}).encode()


DOCUMENTS = [
    ("eins\u2028zwei\x85drei\n\r\nvier", "Github"),
    ("x" * 700_000, "ArXiv"),
    ("é", "Github"),
]


def test_what_is_written_is_read(tmp_path):
    data = encode_jsonl_zst(DOCUMENTS)
    frame = zstandard.get_frame_parameters(data)
    assert frame.has_checksum and frame.content_size > 700_000
    found, counts = read(write(tmp_path / "a.jsonl.zst", data))
    assert found == DOCUMENTS
    assert counts.documents == 3 and not counts.skipped and not counts.changed


@given(
    st.lists(st.binary(max_size=6).map(lambda data: data.replace(b"\n", b"")), max_size=8),
    st.integers(1, 9),
)
def test_lines_are_the_same_however_the_file_is_read(lines, size):
    data = b"".join(part + b"\n" for part in lines)
    chunks = (data[k : k + size] for k in range(0, len(data), size))
    assert list(sources._lines(chunks)) == lines


def test_several_frames_are_one_file(tmp_path):
    frames = [encode_jsonl_zst([document]) for document in DOCUMENTS]
    assert read(write(tmp_path / "a.jsonl.zst", b"".join(frames)))[0] == DOCUMENTS


@pytest.mark.parametrize("kept", [1, 5, -1, -5])
@pytest.mark.parametrize("before", [0, 1])
def test_a_file_cut_anywhere_is_an_error(tmp_path, kept, before):
    frame = encode_jsonl_zst(DOCUMENTS)
    path = write(tmp_path / "a.jsonl.zst", frame * before + frame[:kept])
    with pytest.raises(UserError, match=r"a\.jsonl\.zst is cut short"):
        read(path)


def test_a_file_without_checksum_cut_between_blocks_is_an_error(tmp_path):
    """The writer of lm_dataformat, which made the Pile, leaves checksum and size out."""
    compressor = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    data = compressor.compress(b"\n".join([line("a" * 1000)] * 9) + b"\n")
    data += compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    with pytest.raises(UserError, match="cut short"):
        read(write(tmp_path / "a.jsonl.zst", data))


def test_a_flipped_bit_is_an_error(tmp_path):
    data = bytearray(encode_jsonl_zst([(f"some text {n * n}", "Github") for n in range(500)]))
    data[len(data) // 2] ^= 4
    with pytest.raises(UserError, match="not intact zstd data"):
        read(write(tmp_path / "a.jsonl.zst", bytes(data)))


def test_a_pointer_to_the_file_is_named_as_such(tmp_path):
    data = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    with pytest.raises(UserError, match="Git LFS pointer"):
        read(write(tmp_path / "a.jsonl.zst", data))


def test_byte_order_mark_crlf_blank_lines_and_a_missing_last_newline_are_no_text(tmp_path):
    data = b"\xef\xbb\xbf" + line("a") + b"\r\n\r\n\n" + line("b\\u0000")
    assert [text for text, _ in read(write(tmp_path / "a.jsonl", data))[0]] == ["a", "b\\u0000"]


def test_records_without_a_set_name_are_of_one_source(tmp_path):
    data = b'{"text": "a"}\n{"text": "b", "meta": {}}\n{"text": "c", "meta": null}\n'
    assert {source for _, source in read(write(tmp_path / "a.jsonl", data))[0]} == {"text"}


def test_lone_surrogates_and_empty_texts_are_counted(tmp_path):
    data = b'{"text": "a\\ud800b"}\n{"text": ""}\n{"text": "\\ud83d\\ude42"}\n'
    found, counts = read(write(tmp_path / "a.jsonl", data))
    assert [text for text, _ in found] == ["a\ufffdb", "\N{SLIGHTLY SMILING FACE}"]
    assert sum(counts.changed.values()) == 1 and sum(counts.skipped.values()) == 1
    assert counts.documents == 2


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (b'{"text": 5}', "its text is int, not a string"),
        (b'{"text": null}', "its text is NoneType"),
        (b'{"body": "a"}', 'no field "text"'),
        (b'["a"]', 'no field "text"'),
        (b'{"text": "a', "not valid JSON"),
        (b'{"text": "a\x00b"}', "not valid JSON"),
        (b'{"text": "\xff"}', "not valid JSON"),
    ],
)
def test_an_unfit_record_is_named_by_file_and_line(tmp_path, record, problem):
    path = write(tmp_path / "a.jsonl", line("fine") + b"\n" + record + b"\n")
    with pytest.raises(UserError, match=r"a\.jsonl line 2") as caught:
        read(path)
    assert problem in str(caught.value) and "\n" not in str(caught.value)


def test_a_text_file_is_one_document(tmp_path):
    assert read(write(tmp_path / "a.txt", b"\xef\xbb\xbfone\ntwo"))[0] == [("one\ntwo", "text")]
    with pytest.raises(UserError, match="not UTF-8 at byte 3"):
        read(write(tmp_path / "b.txt", b"one\xff"))


def test_paths_folders_and_globs(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.jsonl", "a.jsonl.zst", "sub/c.txt", "notes.md"):
        write(tmp_path / name, b"")
    names = [item.path.name for item in find_inputs(str(tmp_path))]
    assert names == ["a.jsonl.zst", "b.jsonl", "c.txt"]
    assert [i.path.name for i in find_inputs(str(tmp_path / "*.jsonl*"))] == names[:2]
    assert [i.path.name for i in find_inputs(str(tmp_path / "b.jsonl"))] == ["b.jsonl"]
    for missing in ("none.jsonl", "*.txt"):
        with pytest.raises(UserError, match="names no file"):
            find_inputs(str(tmp_path / missing))
    with pytest.raises(UserError, match=r"notes\.md: only"):
        find_inputs(str(tmp_path / "notes.md"))


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
    inputs = write_stdlib_corpus(tmp_path, 0.05, 0.0)
    assert [(item.name, item.split) for item in inputs] == [
        ("corpus/train.jsonl.zst", "train"),
        ("corpus/validation.jsonl.zst", "validation"),
    ]
    for item in inputs:
        documents = list(read_documents(item.path, ReadCounts()))
        assert documents and {d.source for d in documents} == {"Python stdlib"}
        assert {split_of(d.key, 0.05, 0.0) for d in documents} == {item.split}
