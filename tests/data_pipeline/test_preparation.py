import dataclasses
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from sample_corpus import SEQUENCE_LENGTH, corpus_documents

from data_pipeline.building import MARKER, building
from data_pipeline.dataset import TokenData
from data_pipeline.preparation import default_folder, is_prepared, prepare
from data_pipeline.sources import document_key, encode_jsonl_zst, split_of
from tfbig.config import PrepareConfig
from tfbig.errors import UserError

# Prepares in a process of its own, which ends itself at the n-th fsync or rename.
WORKER = """
import os, signal, sys
import data_pipeline.preparation as preparation
from tfbig.config import PrepareConfig

place, config = int(sys.argv[1]), eval(sys.argv[2])
count = 0

def counted(operation):
    def call(*arguments, **keywords):
        global count
        count += 1
        if count == place:
            os.kill(os.getpid(), signal.SIGKILL)
        return operation(*arguments, **keywords)
    return call

os.fsync, os.replace = counted(os.fsync), counted(os.replace)
preparation.prepare(config, say=lambda text: None)
print(count)
"""


def quiet(text):
    pass


def work(place, config, **environment):
    return subprocess.run(
        [sys.executable, "-c", WORKER, str(place), repr(config)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


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


def test_killed_at_any_file_operation_it_starts_anew_and_ends_alike(
    prepare_config, data_folder, tmp_path
):
    config = dataclasses.replace(prepare_config, keep_tokens=True)
    whole = work(
        0, dataclasses.replace(config, data=str(tmp_path / "whole")), RAYON_NUM_THREADS="1"
    )
    assert whole.returncode == 0, whole.stderr
    num_places = int(whole.stdout)
    expected = contents(tmp_path / "whole")
    # The fixture is of the same settings, made by another process with more threads.
    assert expected == contents(data_folder)
    assert num_places > 30
    folder = tmp_path / "data"
    for place in [1, *np.linspace(2, num_places, 5).astype(int)]:
        killed = work(place, config)
        assert killed.returncode == -signal.SIGKILL
        complete = place == num_places  # only the fsync of the manifest's folder was left
        assert is_prepared(folder) == complete
        if not complete:
            with pytest.raises(UserError, match="not a complete one"):
                TokenData.open(folder)
        prepare(config, quiet)
        assert contents(folder) == expected
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        folder.rmdir()


def test_a_complete_folder_is_reused_and_another_is_refused(prepare_config, corpus):
    said = []
    folder = prepare(prepare_config, quiet)
    before = contents(folder)
    assert prepare(prepare_config, said.append) == folder
    assert said == [f"{folder} is already prepared"] and contents(folder) == before
    other = dataclasses.replace(prepare_config, seed=7, sequence_length=32)
    with pytest.raises(
        UserError, match="sequence_length is 16 there and 32 here; seed is 0"
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


def test_two_processes_do_not_prepare_one_folder(prepare_config, tmp_path):
    with building(tmp_path / "data"):
        result = work(0, prepare_config)
    assert "another process is preparing" in result.stderr


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
    assert sorted(p.name.split(".")[0] for p in (data_folder / "tokens").glob("*.idx")) == [
        "train",
        "train",
        "validation",
        "validation",
    ]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"sequence_length": 0}, "--sequence_length=0 must be at least 1"),
        ({"validation_fraction": 1.0}, "their sum is below 1"),
        ({"validation_fraction": 0.6, "test_fraction": 0.5}, "their sum is below 1"),
        ({"test_fraction": -0.1}, "at least 0"),
        ({"validation_fraction": float("nan")}, "their sum is below 1"),
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
    ],
)
def test_a_bad_option_is_one_line_and_leaves_nothing(prepare_config, tmp_path, changes, problem):
    with pytest.raises(UserError, match=problem) as caught:
        prepare(dataclasses.replace(prepare_config, **changes), quiet)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "data").exists()


def test_damage_in_the_input_stops_it(prepare_config, tmp_path):
    source = tmp_path / "a.jsonl.zst"
    source.write_bytes(encode_jsonl_zst(corpus_documents())[:-6])
    with pytest.raises(UserError, match="cut short"):
        prepare(dataclasses.replace(prepare_config, source=str(source)), quiet)
    assert not (tmp_path / "data").exists()


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
