import errno
import json
import math
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tfbig.errors import UserError
from tfbig.record_file import RecordWriter, encode_record, read_records
from tfbig.run_folder import RunFolder, archive_for_restart, read_events, read_metrics


def test_the_files_are_where_the_design_says(tmp_path):
    folder = RunFolder(tmp_path / "run")
    assert not folder.path.exists()
    folder.create()
    folder.create()
    paths = [
        folder.config_path,
        folder.metrics_path,
        folder.events_path,
        folder.tensorboard_dir,
        folder.checkpoints_dir,
        folder.profiler_dir,
        folder.report_path,
    ]
    assert [path.relative_to(folder.path).as_posix() for path in paths] == [
        "config.json",
        "metrics.jsonl",
        "events.jsonl",
        "tensorboard",
        "checkpoints",
        "profiler-output",
        "report.html",
    ]
    assert folder.checkpoints_dir.is_dir()


@pytest.mark.parametrize("path", ["gs://bucket/run", "s3://bucket/run", "hdfs://host/run", ""])
def test_a_folder_that_is_not_here_is_refused_in_one_line(path):
    with pytest.raises(UserError, match="name") as caught:
        RunFolder(path)
    assert "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_made_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").write_text("the user's")
    with pytest.raises(UserError, match=r"cannot make the run's folder .*Not a directory"):
        RunFolder(tmp_path / "file" / "run").create()
    assert (tmp_path / "file").read_text() == "the user's"


def test_metrics_are_read_by_kind_and_the_last_of_a_step_holds(tmp_path):
    folder = RunFolder(tmp_path)
    with folder.open_metrics() as metrics:
        for step in (1, 2, 3):
            metrics.write({"kind": "train", "step": step, "loss": 1.0 * step})
        metrics.write({"kind": "eval", "step": 2, "loss": 9.0})
    with folder.open_metrics() as metrics:  # resumed from step 1
        metrics.write({"kind": "train", "step": 2, "loss": 20.0})
        metrics.write({"kind": "train", "step": 4, "loss": 40.0})
    train = read_metrics(folder.metrics_path)
    assert [(record["step"], record["loss"]) for record in train] == [
        (1, 1.0),
        (2, 20.0),
        (3, 3.0),
        (4, 40.0),
    ]
    assert all(record["time"] > 1e9 for record in train)
    assert [record["loss"] for record in read_metrics(tmp_path, "eval")] == [9.0]
    assert len(folder.metrics_path.read_bytes().splitlines()) == 6


def test_events_say_when_and_why(tmp_path):
    with RunFolder(tmp_path).open_events() as events:
        events.write_event("start", "from scratch", step=0)
        events.write_event("stop", "SIGTERM", step=7)
    found = read_events(tmp_path)
    assert [(event["event"], event["reason"], event["step"]) for event in found] == [
        ("start", "from scratch", 0),
        ("stop", "SIGTERM", 7),
    ]
    assert found[0]["time"] <= found[1]["time"]


def test_a_run_without_records_has_none(tmp_path):
    assert read_metrics(tmp_path) == read_events(tmp_path) == []


def test_a_record_is_in_the_file_when_write_returns(tmp_path):
    writer = RecordWriter(tmp_path / "a")
    writer.write({"step": 1})
    assert [record["step"] for record in read_records(tmp_path / "a")] == [1]
    writer.close()
    writer.close()


@pytest.mark.parametrize("num_bytes_lost", range(1, 40))
def test_a_torn_last_line_is_moved_away_and_nothing_is_lost(tmp_path, num_bytes_lost):
    path = tmp_path / "metrics.jsonl"
    with RecordWriter(path) as writer:
        writer.write({"step": 1, "time": 0})
        writer.write({"step": 2, "time": 0, "text": "a line without its end"})
    contents = path.read_bytes()
    torn = contents[:-num_bytes_lost]
    path.write_bytes(torn)
    is_whole_record = num_bytes_lost == 1
    assert [record["step"] for record in read_records(path)] == [1, 2][: 1 + is_whole_record]
    with RecordWriter(path) as writer:
        writer.write({"step": 3})
    expected = [1, 2, 3] if is_whole_record else [1, 3]
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == expected
    assert [record["step"] for record in read_records(path)] == expected
    torn_path = tmp_path / "metrics.jsonl.torn"
    assert torn_path.exists() != is_whole_record
    if not is_whole_record:
        assert torn_path.read_bytes() == torn[torn.index(b"\n") + 1 :] + b"\n"


def test_a_long_torn_line_and_one_of_zero_bytes_are_moved_away(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b'{"step":1}\n' + b"\0" * 200_000)
    with RecordWriter(path) as writer:
        writer.write({"step": 2})
    path.write_bytes(path.read_bytes() + b'{"text": "' + b"x" * 200_000)
    RecordWriter(path).close()
    assert [record["step"] for record in read_records(path)] == [1, 2]
    assert (tmp_path / "a.torn").stat().st_size == 400_000 + 10 + 2


def test_a_full_disk_leaves_whole_records(tmp_path, monkeypatch):
    path = tmp_path / "a"
    writer = RecordWriter(path)
    writer.write({"step": 1})
    real_write = os.write
    calls = []

    def write_half(descriptor, data):
        calls.append(data)
        if len(calls) == 1:
            return real_write(descriptor, data[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_half)
        with pytest.raises(OSError, match="No space left"):
            writer.write({"step": 2})
    writer.write({"step": 3})
    writer.close()
    assert [record["step"] for record in read_records(path)] == [1, 3]


def test_numbers_json_lacks_are_null_for_others_and_come_back_for_us(tmp_path):
    record = {
        "loss": math.nan,
        "grad_norm": np.float32("inf"),
        "step": np.int64(3),
        "axes": {"data": -math.inf, "model.x": 1.5},
        "list": [1.0, [math.nan]],
        "array": np.array([1.0, math.inf]),
        "weights": {"a.b": {"c": math.inf}},
    }
    with RecordWriter(tmp_path / "a") as writer:
        writer.write(record)

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    plain = json.loads((tmp_path / "a").read_text(), parse_constant=refuse)
    assert plain["loss"] is None and plain["grad_norm"] is None
    assert plain["nonfinite"]["loss"] == "nan" and plain["nonfinite"]["axes.data"] == "-inf"
    found = read_records(tmp_path / "a")[0]
    del found["time"]
    assert repr(found) == repr(
        {
            "loss": math.nan,
            "grad_norm": math.inf,
            "step": 3,
            "axes": {"data": -math.inf, "model.x": 1.5},
            "list": [1.0, [math.nan]],
            "array": [1.0, math.inf],
            "weights": {"a.b": {"c": math.inf}},
        }
    )


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.text("abc", min_size=1), values, max_size=4))
def test_any_record_comes_back(tmp_path_factory, record):
    path = tmp_path_factory.getbasetemp() / "records"
    path.write_bytes(encode_record(record) + b"\n")
    assert repr(read_records(path)) == repr([record])


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    (tmp_path / "a").write_text('{"step":1}\n{"st\n{"step":3}\n')
    with pytest.raises(UserError, match="a, line 2, is not JSON"):
        read_records(tmp_path / "a")


def test_the_config_is_kept_with_versions_and_command(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_config({"model": {"num_layers": 2}}, ["tfbig", "train", "--steps=3"])
    found = folder.read_config()
    assert found["config"] == {"model": {"num_layers": 2}}
    assert found["command"] == ["tfbig", "train", "--steps=3"]
    assert found["versions"]["numpy"] == np.__version__ and found["versions"]["python"]
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_config_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.write_config({"steps": 1}, [])

    def fail(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="Input/output"):
            folder.write_config({"steps": 2}, [])
    assert folder.read_config()["config"] == {"steps": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_folder_of_no_run_or_with_a_damaged_config_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"is not the folder of a run: it has no config.json"):
        RunFolder(tmp_path).read_config()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json cannot be read"):
        RunFolder(tmp_path).read_config()


def test_a_restart_renames_the_old_folder_and_deletes_nothing(tmp_path, monkeypatch):
    run = tmp_path / "run"
    assert archive_for_restart(run) is None
    (tmp_path / "run.2").mkdir()  # empty: a bare rename would replace it
    (tmp_path / "run.1").symlink_to(tmp_path / "nowhere")
    for number, path in ((3, f"{run}/"), (4, "run"), (5, "run/../run")):
        RunFolder(run).create()
        (run / "metrics.jsonl").write_text(str(number))
        monkeypatch.chdir(tmp_path)
        assert archive_for_restart(path).resolve() == tmp_path / f"run.{number}"
        assert not run.exists()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["run.1", "run.2", "run.3", "run.4", "run.5"]
    assert (tmp_path / "run.3" / "metrics.jsonl").read_text() == "3"
    RunFolder(run).create()
    monkeypatch.chdir(run)
    for path in (".", "../run", "checkpoints/.."):
        with pytest.raises(UserError, match="the working directory is in it"):
            archive_for_restart(path)
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "letters", tmp_path / "letter.txt"):
        if path.suffix:
            path.write_text("the user's")
        else:
            path.mkdir()
            (path / "letter.txt").write_text("the user's")
        with pytest.raises(UserError, match="cannot rename"):
            archive_for_restart(path)
        assert path.exists()
