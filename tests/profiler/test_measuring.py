"""What a run measures of itself: the files it leaves, and what they say."""

import json
import time

import numpy as np
import pytest

from tfbig import train
from tfbig.errors import UserError
from tfbig.profile_config import parse_steps
from tfbig.profiler.capture import CaptureHook
from tfbig.profiler.clock_offset import offset_between
from tfbig.profiler.event_writer import EventWriter
from tfbig.profiler.host_metrics import HostMetrics, Metric, find_limits, parse_cores
from tfbig.profiler.intervals import split_time, union_length
from tfbig.profiler.place import host_place
from tfbig.profiler.sampler import Sampler
from tfbig.profiler.step_table import StepTableWriter, describe_rank, read_steps
from tfbig.profiler.system_writer import SystemWriter
from tfbig.profiler.xplane import phase_of
from tfbig.run_folder import read_metrics


def test_a_run_writes_smdebugs_tree(measured_run):
    output = measured_run / "profiler-output"
    files = sorted(output.glob("system/incremental/*/*.algo-1.json"))
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    assert {frozenset(line) for line in lines} == {
        frozenset({"Type", "Name", "Dimension", "Value", "NodeId", "Timestamp"})
    }
    kinds = {(line["Type"], line["Dimension"]) for line in lines}
    assert {("cpu", "CPUUtilization"), ("cpu", "I/OWaitPercentage"), ("memory", "")} <= kinds
    cores = [line["Value"] for line in lines if line["Dimension"] == "CPUUtilization"]
    assert max(cores) > 0 and all(0 <= value <= 100.5 for value in cores)
    events = []
    for path in output.glob("framework/pevents/*/*_pythontimeline.json"):
        end, worker, _ = path.name.split("_", 2)
        assert end.isdigit() and "-" in worker
        events += json.loads(path.read_text())
    names = {event["name"] for event in events if event["ph"] == "X"}
    expected = "Step:ModeKeys.TRAIN Step:ModeKeys.EVAL GetNext Checkpoint Initialization Compile"
    assert set(expected.split()) - {"Compile"} <= names and "first call of the step" in names
    assert not list(output.glob("framework/pevents/*.tmp"))


def test_the_step_table_agrees_with_the_metrics(measured_run):
    rows = read_steps(measured_run / "profiler-output", 0)
    records = read_metrics(measured_run)
    assert rows["step"].tolist() == [record["step"] for record in records] == list(range(1, 31))
    for row, record in zip(rows, records, strict=True):
        assert row["seconds"] == pytest.approx(record["step_seconds"], rel=1e-5)
        assert row["data_wait"] == pytest.approx(record["data_wait_seconds"], rel=1e-5)
        assert row["resident_megabytes"] > 50 and np.isnan(row["forward"])
        assert abs(row["start"] + row["seconds"] - record["time"]) < 5
    description = describe_rank(measured_run / "profiler-output", 0)
    assert description["clock_offset_seconds"] == 0 and description["node_id"] == "algo-1"


def test_a_capture_whose_step_failed_leaves_the_profiler_to_the_next_run(tmp_path, capsys):
    failed = CaptureHook(tmp_path / "failed", 0, [range(1, 2)])
    failed.on_sample_begin(1)
    second = CaptureHook(tmp_path / "second", 0, [range(1, 2)])
    second.on_sample_begin(1)  # the process has one profiler, and the failed run holds it
    assert "no more steps are captured" in capsys.readouterr().err and not second.samples(1)
    failed.close()
    third = CaptureHook(tmp_path / "third", 0, [range(1, 2)])
    third.on_sample_begin(1)
    third.on_sample_end(1)
    third.close()
    assert not capsys.readouterr().err and list((tmp_path / "third").rglob("*.xplane.pb"))


def test_a_captured_step_is_split_without_a_rest(measured_run):
    path = measured_run / "profiler-output/captures/rank-00000.jsonl"
    captures = [json.loads(line) for line in path.read_text().splitlines()]
    assert [capture["step"] for capture in captures] == [5, 6, 7]
    for capture in captures:
        split = capture["split"]
        assert sum(split.values()) == pytest.approx(capture["wall_seconds"], rel=1e-6)
        for part in ("forward", "backward", "optimizer"):
            assert split[part] > 0, part
        phases = {(op["type"], op["phase"]) for op in capture["operators"]}
        assert ("ResourceApplyAdam", "optimizer") in phases and ("MatMul", "backward") in phases


def test_profiling_changes_no_number(measured_run, tmp_path, small_flags):
    flags = ["--steps=12", "--eval_every=10", "--layer_grad_norms", f"--run_dir={tmp_path / 'run'}"]
    assert train._body([*small_flags, *flags, "--noprofile"]) == 0
    assert not (tmp_path / "run/profiler-output").exists()
    with_it = [record["loss"] for record in read_metrics(measured_run)[:12]]
    assert [record["loss"] for record in read_metrics(tmp_path / "run")] == pytest.approx(with_it)


def test_bad_flags_are_named(small_flags):
    for flag, words in {
        "--profile_interval_ms=50": "between 100 and 60000",
        "--profile_steps=7-5": "'7-5'",
        "--profile_steps=x": "write e.g. 5,100-102",
        "--rule_webhook=ftp://a": "http",
        "--stop_on_rule=MemoryLeek": "Did you mean MemoryLeak",
    }.items():
        with pytest.raises(UserError, match=words):
            train._body([*small_flags, flag])
    assert [list(part) for part in parse_steps("3, 5-6")] == [[3], [5, 6]]


def test_a_busy_core_and_a_written_file_are_seen(tmp_path):
    limits = find_limits()
    metrics = HostMetrics(limits)
    end = time.monotonic() + 0.4
    while time.monotonic() < end:
        pass
    sample = {metric[:3]: metric.value for metric in metrics.sample()}
    cores = [value for key, value in sample.items() if key[1] == "CPUUtilization"]
    assert len(cores) == len(limits.cores) and sum(cores) > 30
    assert 0 < sample["memory", "", "MemoryUsedPercent"] < 100
    assert 0 < limits.cpu_quota <= len(limits.cores) and limits.memory_bytes > 2**28


def test_a_containers_limits_are_read(tmp_path):
    for name, text in {"cpu.max": "50000 100000", "memory.max": "1048576"}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "cpuset.cpus.effective").write_text("0")
    assert find_limits(tmp_path) == ((0,), 0.5, 1 << 20)
    assert parse_cores("0-1,4") == (0, 1, 4) and parse_cores("") == ()


def test_the_sampler_thread_starts_writes_and_ends(tmp_path):
    sampler = Sampler(tmp_path, host_place({}), 0.1)
    sampler.start()
    deadline = time.monotonic() + 10
    while not list(tmp_path.glob("system/*/*/*.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    sampler.stop()
    assert not sampler._thread.is_alive()
    header, first = (tmp_path / "minutes/algo-1.jsonl").read_text().splitlines()[:2]
    assert ["cpu", "CPUUtilization", "cpu0"] in json.loads(header)["columns"]
    assert json.loads(first)["samples"] >= 1
    assert json.loads((tmp_path / "hosts/algo-1.json").read_text())["interval"] == 0.1


def test_a_full_disk_ends_sampling_alone(tmp_path, capfd):
    (tmp_path / "minutes").write_text("a file where the folder should be")
    sampler = Sampler(tmp_path, host_place({}), 0.1)
    sampler.start()
    sampler._thread.join(10)
    assert "sampled no longer" in capfd.readouterr().err


def test_quantiles_by_minute(tmp_path):
    writer = SystemWriter(tmp_path, "algo-1")
    for second in range(101):
        writer.write(6000 + second / 10, [Metric("cpu", "CPUUtilization", "cpu0", second)])
    writer.write(6061, [Metric("cpu", "CPUUtilization", "cpu1", 7)])
    writer.close()
    lines = [json.loads(x) for x in (tmp_path / "minutes/algo-1.jsonl").read_text().splitlines()]
    assert [row[0] for row in lines[1]["values"]] == [0, 5, 50, 95, 100, 50]
    assert lines[2]["columns"][1][2] == "cpu1" and lines[3]["values"][2] == [None, 7]


def test_event_files_rotate_and_hold_rank_zeros_clock(tmp_path):
    writer = EventWriter(tmp_path, 3, "a_b", clock_offset=2.0)
    writer.write("Step", "Step", 10_000.0, 0.5, {"step_num": "1"})
    writer.close()
    writer.write("Step", "Step", 20_000.0, 0.5, {"step_num": "2"})
    assert len(list(tmp_path.glob("framework/pevents/*.tmp"))) == 1
    writer.close()
    paths = sorted(
        tmp_path.glob("framework/pevents/*/*.json"), key=lambda p: int(p.name.split("_")[0])
    )
    assert paths[0].name.startswith("9998500000_") and "a-b" in paths[0].name
    events = json.loads(paths[0].read_text())
    base = events[0]["args"]["start_time_since_epoch_in_micros"]
    step = next(event for event in events if event["ph"] == "X")
    assert base + step["ts"] == 9_998_000_000 and step["tid"] == 3 and step["dur"] == 500_000


def test_a_torn_row_is_cut_and_the_last_of_two_holds(tmp_path):
    writer = StepTableWriter(tmp_path, 0, {})
    for step, seconds in ((1, 1.0), (2, 2.0)):
        writer.write({"step": step, "seconds": seconds})
    writer.close()
    with open(tmp_path / "steps/rank-00000.bin", "ab") as file:
        file.write(b"torn")
    writer = StepTableWriter(tmp_path, 0, {})
    writer.write({"step": 2, "seconds": 3.0})
    writer.close()
    rows = read_steps(tmp_path, 0)
    assert rows["step"].tolist() == [1, 2] and rows["seconds"].tolist() == [1.0, 3.0]


def test_clock_offsets_are_bounded():
    """Ranks' clocks differ by 5 s; collectives last up to 3 ms, and start at different times."""
    rng = np.random.default_rng(0)
    entry, late = np.arange(8.0), rng.uniform(0, 0.002, 8)
    left = entry + late + rng.uniform(0.0001, 0.001, 8)
    zero = np.stack([entry, left], axis=1)
    here = np.stack([entry + late, left + rng.uniform(0, 0.0005, 8)], axis=1) + 5.0
    offset = offset_between(here, zero)
    assert abs(offset.seconds - 5.0) <= offset.error < 0.003


def test_places_by_launcher():
    assert host_place({"HOROVOD_LOCAL_RANK": "3", "HOROVOD_CROSS_RANK": "1"})[:2] == (1, 3)
    assert host_place({"SLURM_LOCALID": "0", "SLURM_NODEID": "2"}).node_id == "algo-3"
    cluster = {"chief": ["a:1"], "worker": ["a:2", "b:1"]}
    for index, place in ((0, (0, 1)), (1, (1, 0))):
        task = {"cluster": cluster, "task": {"type": "worker", "index": index}}
        assert host_place({"TF_CONFIG": json.dumps(task)})[:2] == place
    assert host_place({"TF_CONFIG": "damaged"})[:2] == host_place({})[:2] == (0, 0)


def test_time_is_split_without_counting_twice():
    kinds = {"compute": np.array([[1.0, 3.0], [2.0, 4.0]]), "send": np.array([[3.5, 6.0]])}
    split = split_time(kinds, 0.0, 5.0, "rest")
    assert split == {"compute": 3.0, "send": 1.0, "rest": 1.0}
    assert union_length(np.zeros([0, 2])) == 0


def test_phases_by_name():
    assert phase_of("optimizer/ResourceApplyAdam_3") == "optimizer"
    assert phase_of("gradient_tape/gpt/MatMul") == "backward" and phase_of("MatMul") == "forward"
