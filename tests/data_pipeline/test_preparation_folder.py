import dataclasses
import json
import os

import pytest
from preparing import contents, quiet, work
from sample_corpus import corpus_documents

from data_pipeline.building import MARKER, building
from data_pipeline.dataset import TokenData
from data_pipeline.preparation import default_folder, is_prepared, prepare
from data_pipeline.stdlib_corpus import encode_jsonl_zst
from tfbig.config import PrepareConfig
from tfbig.errors import UserError


def test_a_complete_folder_is_reused_and_another_is_refused(prepare_config, corpus):
    said = []
    folder = prepare(prepare_config, quiet)
    before = contents(folder)
    assert prepare(prepare_config, said.append) == folder
    assert said[0] == f"{folder} is already prepared" and contents(folder) == before
    other = dataclasses.replace(prepare_config, seed=7, sequence_length=32)
    with pytest.raises(
        UserError, match="seed is 0 there and 7 here; sequence_length is 16"
    ) as error:
        prepare(other, quiet)
    assert "\n" not in str(error.value) and contents(folder) == before


def test_inputs_that_changed_since_are_noticed(prepare_config, tmp_path):
    source = tmp_path / "a.jsonl.zst"
    source.write_bytes(encode_jsonl_zst(corpus_documents()))
    config = dataclasses.replace(prepare_config, source=str(source))
    prepare(config, quiet)
    source.write_bytes(encode_jsonl_zst([*corpus_documents(), ("more", "Github")]))
    with pytest.raises(UserError, match=r"a\.jsonl\.zst has changed since"):
        prepare(config, quiet)


def test_the_users_own_folder_is_left_alone(prepare_config, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("the user's")
    with pytest.raises(UserError, match="is not empty and not a data folder"):
        prepare(prepare_config, quiet)
    assert contents(folder) == {"tokenizer.json": b"the user's"}
    with pytest.raises(UserError, match="there is a file of that name"):
        prepare(dataclasses.replace(prepare_config, data=str(folder / "tokenizer.json")), quiet)


def test_only_what_is_ours_is_removed_from_a_half_made_folder(prepare_config, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name in (MARKER, "notes.txt", "tokenizer.json", "tfbig_text-train.tfrecord-00000-of-00009"):
        (folder / name).write_text("old")
    prepare(prepare_config, quiet)
    found = contents(folder)
    assert found["notes.txt"] == b"old" and MARKER not in found
    assert not [name for name in found if name.endswith("of-00009")]
    TokenData.open(folder)


def test_processes_with_other_options_do_not_meet(prepare_config, tmp_path):
    with building(tmp_path / "data", b"another plan"):
        result = work(0, prepare_config)
    assert "with other options: wait for it" in result.stderr


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"sequence_length": 0}, "--sequence_length=0 must be at least 1"),
        ({"validation_fraction": 1.0}, "whose sum is below 1"),
        ({"validation_fraction": 0.6, "test_fraction": 0.5}, "whose sum is below 1"),
        ({"test_fraction": -0.1}, "at least 0"),
        ({"validation_fraction": float("nan")}, "whose sum is below 1"),
        ({"seed": -1}, "--seed=-1 must lie between"),
        ({"vocab_size": 100}, "--vocab_size=100 is too small"),
        ({"shard_bytes": 50}, "--shard_bytes=50 is less than one row"),
        ({"source": "none.jsonl"}, "names no file"),
        ({"tokenizer": "none.json"}, "cannot read tokenizer none.json"),
        (
            {"sequence_length": 9000, "shard_bytes": 1 << 20},
            r"the train split has \d+ tokens in \d+ documents: no row",
        ),
        ({"validation_fraction": 1e-9}, "the validation split has 0 tokens in 0 documents"),
        ({"data": "gs://bucket/data"}, "written to file systems only"),
        ({"max_bad_fraction": 2}, "must lie between 0 and 1"),
        ({"workers": -1}, "must not be negative"),
        ({"chunk_bytes": 0}, "must be at least 1"),
        ({"vocab_size": 10**12}, "more than the 16,777,216 entries"),
        ({"min_characters": 9, "max_characters": 5}, "the first must not exceed the second"),
        ({"data": "/proc/none"}, "cannot be made: No such file or directory"),
        ({"data": "x" * 300}, "cannot be made: File name too long"),
        ({"text_field": "body"}, r"The first of \d+ unfit records: .* line 1 has no field"),
        ({"prompt_field": "a"}, "go together"),
        ({"source": "doma:x"}, "no preset 'doma'"),
    ],
)
def test_a_bad_option_is_one_line_and_leaves_nothing(prepare_config, tmp_path, changes, problem):
    with pytest.raises(UserError, match=problem) as caught:
        prepare(dataclasses.replace(prepare_config, **changes), quiet)
    assert "\n" not in str(caught.value)
    left = tmp_path / "data"
    assert not left.exists() or MARKER in os.listdir(left)  # what is complete is kept
    assert not is_prepared(left)


def test_what_is_asked_of_sources_and_is_not_there_is_said(prepare_config, tmp_path):
    said = []
    prepare(dataclasses.replace(prepare_config, exclude_source=("Githu", "Pile-CC")), said.append)
    (warning,) = [text for text in said if "warning" in text and "encoder" not in text]
    assert "--exclude_source=Githu left out nothing: there are Github" in warning
    said.clear()
    other = dataclasses.replace(prepare_config, source_field="set", data=str(tmp_path / "other"))
    prepare(other, said.append)
    assert any("warning: no record has --source_field=set" in text for text in said)


@pytest.mark.parametrize("place", ["", "/made/here"])
def test_a_data_folder_is_not_made_of_itself(prepare_config, tmp_path, place):
    source = tmp_path / "corpus"
    source.mkdir()
    (source / "a.jsonl").write_text('{"text": "some text"}')
    config = dataclasses.replace(
        prepare_config, source=f"x.jsonl,{source}", data=f"{source}{place}"
    )
    (tmp_path / "x.jsonl").write_text('{"text": "other text"}')
    config = dataclasses.replace(config, source=config.source.replace("x.", f"{tmp_path}/x."))
    with pytest.raises(UserError, match="its own files would be read as text"):
        prepare(config, quiet)
    assert os.listdir(source) == ["a.jsonl"]


def test_damage_in_the_input_stops_it(prepare_config, tmp_path):
    source = tmp_path / "a.jsonl.zst"
    source.write_bytes(encode_jsonl_zst(corpus_documents())[:-6])
    with pytest.raises(UserError, match="cut short"):
        prepare(dataclasses.replace(prepare_config, source=str(source)), quiet)
    assert not (tmp_path / "data").exists()


def test_bad_records_that_are_borne_are_listed(prepare_config, tmp_path):
    source = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": text}) for text, _ in corpus_documents()]
    lines[7], lines[50] = '{"text": 5}', "no json"
    lines[20] = '{"text": "a lone \\ud800 surrogate"}'
    lines[30] = '{"text": ""}'
    source.write_text("\n".join(lines))
    config = dataclasses.replace(prepare_config, source=str(source), max_bad_fraction=0.05)
    said = []
    found = json.loads((prepare(config, said.append) / "manifest.json").read_text())
    (entry,) = found["inputs"]
    assert entry["documents"] == 87 and sum(entry["bad"].values()) == 2
    assert entry["skipped"] == {"empty text": 1} and sum(entry["changed"].values()) == 1
    listed = [
        json.loads(line) for line in (tmp_path / "data/bad_records.jsonl").read_text().splitlines()
    ]
    assert [(record["file"], record["place"]) for record in listed] == [
        (str(source), "line 8"),
        (str(source), "line 51"),
    ]
    assert any("left out: 1 documents: is not valid JSON" in text for text in said)
    assert any("changed: 1 documents: lone surrogate" in text for text in said)
    strict = dataclasses.replace(config, max_bad_fraction=0.01, data=str(tmp_path / "strict"))
    with pytest.raises(UserError, match=r"2 of 89 records are unfit .* the first is .* line 8"):
        prepare(strict, quiet)


def test_copies_of_files_and_wrong_checksums_are_refused(prepare_config, corpus, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("a.jsonl.zst", "b.jsonl.zst"):
        (folder / name).write_bytes(corpus.read_bytes())
    config = dataclasses.replace(prepare_config, source=str(folder))
    with pytest.raises(UserError, match=r"b\.jsonl\.zst is a copy of .*a\.jsonl\.zst"):
        prepare(config, quiet)
    once = dataclasses.replace(config, remove_duplicates=True, data=str(tmp_path / "once"))
    found = json.loads((prepare(once, quiet) / "manifest.json").read_text())
    assert found["duplicates"] == {"equal": 90, "near": 0, "documents": 180}
    digest = found["inputs"][0]["sha256"]
    (folder / "b.jsonl.zst").unlink()
    (folder / "SHA256SUMS.txt").write_text(f"{digest}  a.jsonl.zst\n")
    prepare(dataclasses.replace(config, data=str(tmp_path / "right")), quiet)
    (folder / "SHA256SUMS.txt").write_text(f"{'0' * 64}  a.jsonl.zst\n")
    with pytest.raises(UserError, match=r"is not the file that .* names"):
        prepare(dataclasses.replace(config, data=str(tmp_path / "wrong")), quiet)


def test_a_folder_that_cannot_be_written_is_one_line(prepare_config, monkeypatch):
    import errno

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("data_pipeline.shards.os.fsync", full)
    with pytest.raises(UserError, match=r"cannot prepare .*: No space left on device"):
        prepare(prepare_config, quiet)


def test_the_default_folder_names_what_it_holds():
    assert default_folder("stdlib", 4096, 256) == "data/stdlib_4096_256"
    assert default_folder("../a b/*.jsonl", 300, 16) == "data/___a_b___jsonl_300_16"
    assert PrepareConfig().data == ""


def test_the_entry_point_says_mistakes_in_one_line(capsys):
    from tfbig.prepare import main

    with pytest.raises(SystemExit) as caught:
        main(["--source=none.jsonl"])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "names no file" in error
