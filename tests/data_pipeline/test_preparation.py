import dataclasses
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import zstandard
from sample_corpus import SEQUENCE_LENGTH, corpus_documents

from data_pipeline.building import MARKER, building
from data_pipeline.dataset import TokenData
from data_pipeline.documents import document_key, split_of
from data_pipeline.preparation import default_folder, is_prepared, prepare
from data_pipeline.stdlib_corpus import encode_jsonl_zst
from data_pipeline.tokenizer import Tokenizer
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

os.fsync, os.replace, os.rename = counted(os.fsync), counted(os.replace), counted(os.rename)
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


def make_several_inputs(folder):
    """Several files of several kinds, of which some are split and some are read together."""
    folder.mkdir()
    documents = list(corpus_documents())
    for number in range(3):
        path = folder / f"{number}.jsonl.zst"
        path.write_bytes(encode_jsonl_zst(documents[number::4]))
    lines = [
        json.dumps({"text": text, "meta": {"pile_set_name": source}})
        for text, source in documents[3::4]
    ]
    (folder / "3.jsonl").write_text("\n".join(lines))
    (folder / "notes.txt").write_text("one document of a text file " * 9)


@pytest.fixture
def several(tmp_path, prepare_config, data_folder):
    make_several_inputs(tmp_path / "several")
    return dataclasses.replace(
        prepare_config,
        source=str(tmp_path / "several"),
        tokenizer=str(data_folder / "tokenizer.json"),
        chunk_bytes=1000,
        keep_tokens=True,
    )


def test_any_number_of_workers_and_kills_gives_the_same_bytes(several, tmp_path):
    said = {"one": [], "four": []}
    one = dataclasses.replace(several, data=str(tmp_path / "one"), workers=1)
    expected = contents(prepare(one, said["one"].append))
    assert len([name for name in expected if name.endswith(".idx")]) > 8
    four = dataclasses.replace(several, data=str(tmp_path / "four"), workers=4)
    assert contents(prepare(four, said["four"].append)) == expected
    hashes = [[line for line in lines if "corpus sha256" in line] for lines in said.values()]
    assert hashes[0] == hashes[1] and len(hashes[0]) == 1
    # Chunks of another size hold the same documents: only the kept stores are others.
    whole = dataclasses.replace(several, data=str(tmp_path / "whole"), chunk_bytes=1 << 30)
    shards = {name: data for name, data in expected.items() if ".tfrecord-" in name}
    found = contents(prepare(whole, quiet))
    assert shards == {name: data for name, data in found.items() if ".tfrecord-" in name}


def test_killed_at_any_file_operation_it_goes_on_and_ends_alike(several, tmp_path):
    config = dataclasses.replace(several, workers=1)
    whole = work(
        0, dataclasses.replace(config, data=str(tmp_path / "whole")), RAYON_NUM_THREADS="1"
    )
    assert whole.returncode == 0, whole.stderr
    num_places = int(whole.stdout)
    expected = contents(tmp_path / "whole")
    assert num_places > 100
    folder = tmp_path / "data"
    # One attempt after the other is killed, each later than the last.
    for place in np.linspace(1, num_places, 8).astype(int):
        killed = work(place, config)
        if killed.returncode == 0:  # what earlier attempts completed is not done again
            break
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        if not is_prepared(folder):
            with pytest.raises(UserError, match="not a complete one"):
                TokenData.open(folder)
    prepare(config, quiet)
    assert contents(folder) == expected


# Prepares, and is killed some time after it began; its helper ends with it.
KILLED_ANYWHERE = """
import os, signal, sys, time, threading
import data_pipeline.preparation as preparation
from tfbig.config import PrepareConfig

seconds, config = float(sys.argv[1]), eval(sys.argv[2])
preparation.Tokenizer.load(config.tokenizer)
threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start() if seconds else None
start = time.perf_counter()
preparation.prepare(config, say=lambda text: None)
print(time.perf_counter() - start)
os._exit(0)
"""


def test_killed_at_any_moment_it_goes_on_and_ends_alike(several, tmp_path):
    def attempt(seconds, config):
        return subprocess.run(
            [sys.executable, "-c", KILLED_ANYWHERE, str(seconds), repr(config)],
            capture_output=True,
            text=True,
            timeout=120,
        )

    whole = attempt(0, dataclasses.replace(several, data=str(tmp_path / "whole"), workers=2))
    assert whole.returncode == 0, whole.stderr
    expected, lasts = contents(tmp_path / "whole"), float(whole.stdout)
    generator = np.random.default_rng(int.from_bytes(os.urandom(4), "little"))
    kills = 0
    for round_number in range(int(os.environ.get("TFBIG_KILL_ROUNDS", "1"))):
        config = dataclasses.replace(several, data=str(tmp_path / f"{round_number}"), workers=2)
        for seconds in generator.uniform(0.01, lasts / 2, 5):
            kills += attempt(seconds, config).returncode == -signal.SIGKILL
        prepare(config, quiet)
        assert contents(tmp_path / f"{round_number}") == expected
    assert kills >= 2 * (round_number + 1)  # those that came before the end


def test_the_time_of_each_stage_is_said():
    from data_pipeline.account import seconds_line

    times = {name: [2.0, 1.5] for name in ("read", "encode", "write")}
    tokenized = {"a": {"seconds": times, "encoder": "gigatoken"}}
    tokenized["b"] = {"seconds": dict.fromkeys(times, 3.0), "encoder": "tiktoken"}  # as once stored
    line = seconds_line(tokenized, {"order": (None, {"seconds": [1, 0.5]})}, [{"seconds": [4, 2]}])
    assert "read 5.0 (4.5), encode 5.0 (4.5), write 5.0 (4.5), shuffle 1.0 (0.5)" in line
    assert "pack 4.0 (2.0), encoded by gigatoken, tiktoken" in line


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


def test_two_processes_prepare_one_folder_together(several, tmp_path):
    command = [sys.executable, "-c", WORKER, "0", repr(dataclasses.replace(several, workers=1))]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(2)]
    for process in processes:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
    one = dataclasses.replace(several, data=str(tmp_path / "one"), workers=1)
    assert contents(tmp_path / "data") == contents(prepare(one, quiet))


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
