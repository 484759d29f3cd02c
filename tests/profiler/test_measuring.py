"""What a run measures of itself: the files it leaves, and what they say."""

import json
import time

import numpy as np
import pytest

from tfbig import report, train
from tfbig.config import Config, replace_fields
from tfbig.errors import UserError
from tfbig.model.gpt import GPT
from tfbig.profile_config import parse_steps
from tfbig.profiler import xprof_operators as xprof_module
from tfbig.profiler.activations import activation_records
from tfbig.profiler.capture import CaptureHook
from tfbig.profiler.cgroup_limits import find_limits, parse_cores
from tfbig.profiler.clock_offset import offset_between
from tfbig.profiler.event_writer import EventWriter
from tfbig.profiler.host_metrics import HostMetrics, Metric
from tfbig.profiler.intervals import split_time, union_length
from tfbig.profiler.metrics_readers import read_trace
from tfbig.profiler.place import host_place
from tfbig.profiler.sampler import Sampler
from tfbig.profiler.step_table import StepTableWriter, describe_rank, read_steps
from tfbig.profiler.system_writer import SystemWriter
from tfbig.profiler.timeline import TimelineHook
from tfbig.profiler.xplane import phase_of, summary_of
from tfbig.profiler.xprof_operators import xprof_operators
from tfbig.report import ReportConfig
from tfbig.run_folder import read_metrics
from tfbig.step_spans import StepSpans


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
    expected = (
        "Step:ModeKeys.TRAIN Step:ModeKeys.EVAL GetNext Checkpoint Initialization Compile"
        " Finalization"
    )
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


def test_a_pipelines_bubbles_are_noted_and_drawn(tmp_path):
    """Passes of 2, 1 and 3 s, with 1 and 2 s between them."""
    events = EventWriter(tmp_path, 1, "host")
    hook = TimelineHook(StepTableWriter(tmp_path, 1, {}), events, 0.0, 1.0)
    forward, backward = np.array([[100.0, 102], [103, 104]]), np.array([[106.0, 109]])
    spans = {"forward": forward, "backward": backward, "pipeline": np.array([[102.0, 103]])}
    hook.on_spans(StepSpans(1, 100.0, 10.0, 0.5, {"pipeline": 1.0}, spans))
    hook.close()
    (row,) = read_steps(tmp_path, 1)
    assert (row["forward"], row["backward"], row["bubble"]) == (3, 3, 3)
    assert row["pipeline"] == 1 and row["data_wait"] == 0.5
    (path,) = tmp_path.glob("framework/pevents/*/*.json")
    found = [(e.event_name, e.start_time / 1e9, e.duration / 1e9) for e in read_trace(path)]
    assert [one for one in found if one[0] == "Bubble"] == [("Bubble", 102, 1), ("Bubble", 104, 2)]
    assert ("Collective:pipeline", 102, 1) in found and ("Backward", 106, 3) in found


def test_activations_are_noted_by_block(measured_run):
    path = measured_run / "profiler-output/tensors/rank-00000.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    found = [record for record in records if record["kind"] == "activation"]
    assert {record["step"] for record in found} == {1, 5, 10, 15, 20, 25, 30}
    assert {record["name"] for record in found} == {"transformer_blocks/0/ffn"}
    # Small weights: no input is beyond -4, so every unit is active.
    assert all(record["active_percentiles"] == [100] * 101 for record in found)


def test_dead_units_are_seen_in_a_model():
    """Half of a ReLU layer's biases are pulled far below zero."""
    import tensorflow as tf

    model = GPT.from_config(
        replace_fields(Config(), {"activation": "relu", "num_layers": 2, "embed_dim": 8}).model,
        seed=0,
    )
    bias = model.canonical_variables()["transformer_blocks/1/ffn/up/bias"]
    width = bias.shape[0]
    bias.assign(tf.where(tf.range(width) < width // 2, -1e3, 1e3 * tf.ones([width])))
    batch = {"tokens": tf.ones([3, 9], tf.int32), "sample_index": tf.range(3, dtype=tf.int64)}
    first, second = activation_records(model, batch)
    dead = [value for value in second["active_percentiles"] if value == 0]
    assert 45 <= len(dead) <= 50 and second["name"] == "transformer_blocks/1/ffn"
    assert first["function"] == "relu" and max(first["active_percentiles"]) == 100
    assert model.transformer_blocks[0].ffn.look is None


def test_xprofs_operators_are_in_the_report(measured_run):
    pytest.importorskip("xprof")
    capture = min(measured_run.rglob("*.xplane.pb"))
    rows = xprof_operators(capture)
    assert {"MatMul", "ResourceApplyAdam"} <= {row[1] for row in rows}
    assert all(row[-1] >= 0 for row in rows) and rows[0][-1] == max(row[-1] for row in rows)
    page = report.run(ReportConfig(format="md"), [str(measured_run)])
    assert "By xprof: step 5 on rank 0." in page


def test_without_xprof_nothing_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(xprof_module, "is_installed", lambda: False)
    assert xprof_operators(tmp_path / "none") == [] and capsys.readouterr().err == ""
    monkeypatch.setattr(xprof_module, "is_installed", lambda: True)
    assert xprof_operators(tmp_path / "none") == []
    assert "xprof does not read" in capsys.readouterr().err


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


def gpu_kernel(space, start: float, stop: float, kernel: str, operation: str) -> None:
    """Adds a kernel that ran from start to stop, milliseconds, launched by an operation."""
    plane = space.planes[1]
    number = len(plane.event_metadata) + 1
    plane.event_metadata[number].name = kernel
    event = plane.lines[0].events.add(metadata_id=number)
    event.offset_ps, event.duration_ps = round(start * 1e9), round((stop - start) * 1e9)
    event.stats.add(metadata_id=1, str_value=operation)


def test_gpu_kernels_count_by_what_they_are(tmp_path):
    """Copies and NCCL's kernels carry the operation that launched them, as computation does."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    host = space.planes.add(name="/host:CPU")
    host.event_metadata[1].name = "step"
    host.lines.add().events.add(metadata_id=1, duration_ps=round(10e9))
    device = space.planes.add(name="/device:GPU:0")
    device.stat_metadata[1].name = "tf_op"
    device.lines.add(name="Stream #1")
    gpu_kernel(space, 0, 1, "MemcpyH2D", "gpt/embed/GatherV2:GatherV2")
    gpu_kernel(space, 1, 3, "ampere_sgemm", "gpt/dense/MatMul:MatMul")
    gpu_kernel(space, 3, 6, "ncclDevKernel_AllReduce", "gpt/sum/CustomCall:CustomCall")
    gpu_kernel(space, 6, 8, "ampere_sgemm", "gradient_tape/gpt/MatMul:MatMul")
    path = tmp_path / "capture.xplane.pb"
    path.write_bytes(space.SerializeToString())
    spans = StepSpans(1, 100.0, 0.010, 0.0, {}, {})
    split = summary_of(path, "step", 100.0, spans)["split"]
    assert {part: round(1000 * seconds, 3) for part, seconds in split.items()} == {
        "backward": 2.0,
        "forward": 2.0,
        "optimizer": 0.0,
        "host to device": 1.0,
        "exposed communication": 3.0,
        "data wait": 0.0,
        "launch and idle": 2.0,
    }


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


def test_samples_are_on_rank_zeros_clock(tmp_path):
    """This host's clock is 1000 s ahead."""
    sampler = Sampler(tmp_path, host_place({}), 0.1, clock_offset=1000.0)
    sampler.start()
    deadline = time.monotonic() + 10
    while not list(tmp_path.glob("system/*/*/*.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    sampler.stop()
    (path, *_) = sorted(tmp_path.glob("system/*/*/*.json"))
    stamp = json.loads(path.read_text().splitlines()[0])["Timestamp"]
    assert stamp == pytest.approx(time.time() - 1000, abs=15)


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
