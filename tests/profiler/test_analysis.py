"""The analysis API: smdebug's names on our files; the original's notebook cells."""

import json

import numpy as np
import pytest

import tfbig.profiler
from tfbig.errors import UserError
from tfbig.profiler import MergeUnit, Resource, StatsBy
from tfbig.profiler.chart import choose, series_of, thin
from tfbig.profiler.host_metrics import Metric
from tfbig.profiler.metrics_readers import LocalAlgorithmMetricsReader, LocalSystemMetricsReader
from tfbig.profiler.system_table import SystemTable, read_system
from tfbig.profiler.system_writer import SystemWriter
from tfbig.profiler.time_units import TimeUnits


def test_the_originals_cells_run(measured_run):
    """The published notebook's cells; only the import is another."""
    from tfbig.profiler import TimelineCharts, TrainingJob

    training_job_name, region = str(measured_run), "us-east-1"
    tj = TrainingJob(training_job_name, region)
    tj.wait_for_sys_profiling_data_to_be_available()
    system_metrics_reader = tj.get_systems_metrics_reader()
    tj.wait_for_framework_profiling_data_to_be_available()
    framework_metrics_reader = tj.get_framework_metrics_reader()
    system_metrics_reader.refresh_event_file_list()
    view_timeline_charts = TimelineCharts(
        system_metrics_reader,
        framework_metrics_reader,
        select_dimensions=["CPU", "GPU", "I/O"],
        select_events=["total"],
        show_workers=False,
    )
    found = [(one.dimension, one.event) for one in view_timeline_charts.series]
    assert set(found) == {("CPUUtilization", "total"), ("I/OWaitPercentage", "total")}
    assert len(view_timeline_charts.figure.data) == 2
    assert len(view_timeline_charts.figure.data[0].y) > 10
    seconds = view_timeline_charts.find_time_annotations([0, 1_000_000])  # to the last sample
    assert sum("Step:ModeKeys.TRAIN" in name for name in seconds) == 30
    drawn = view_timeline_charts.plot_detailed_profiler_data([0, 1000])
    assert {trace.name for trace in drawn.data} >= {"Step:ModeKeys.TRAIN", "DataIterator"}
    view_timeline_charts.update_data(system_metrics_reader.get_timestamp_of_latest_available_file())


def test_all_names_are_there(measured_run):
    for name in dir(tfbig.profiler):
        assert getattr(tfbig.profiler, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute"):
        tfbig.profiler.Nothing  # noqa: B018


def test_jobs_are_described(measured_run, tmp_path):
    described = tfbig.profiler.TrainingJob(measured_run).describe_training_job()
    assert described["TrainingJobStatus"] == "Completed"
    assert described["TrainingEndTime"] > described["TrainingStartTime"]
    with pytest.raises(UserError, match=r"config\.json"):
        tfbig.profiler.TrainingJob(tmp_path)
    (tmp_path / "config.json").write_bytes((measured_run / "config.json").read_bytes())
    (tmp_path / "events.jsonl").write_bytes((measured_run / "events.jsonl").read_bytes())
    with pytest.raises(UserError, match="--noprofile"):
        tfbig.profiler.TrainingJob(tmp_path).wait_for_sys_profiling_data_to_be_available()


def test_charts_of_a_run(measured_run):
    job = tfbig.profiler.TrainingJob(measured_run)
    system, framework = job.get_systems_metrics_reader(), job.get_framework_metrics_reader()
    heatmap = tfbig.profiler.Heatmap(system).figure
    assert "algo-1 CPUUtilization cpu0" in heatmap.data[0].y and heatmap.data[0].zmax == 100
    histogram = tfbig.profiler.MetricsHistogram(system)
    histogram.plot(select_dimensions=["CPUUtilization"], select_events=["cpu"])
    assert len(histogram.figure.data) >= 1 and histogram.figure.data[0].xbins.size == 2
    steps = tfbig.profiler.StepHistogram(framework)
    steps.plot()
    assert len(steps.step_metrics["Step:ModeKeys.TRAIN, rank 0"]) == 30
    timeline = tfbig.profiler.StepTimelineChart(framework).figure
    lengths = {trace.name: len(trace.y) for trace in timeline.data}
    assert lengths["Step:ModeKeys.TRAIN, rank 0"] in (28, 29)  # one process, or two


def test_the_merged_timeline_is_one_trace(measured_run, tmp_path):
    merged = tfbig.profiler.MergedTimeline(
        measured_run / "profiler-output", output_directory=tmp_path
    )
    path = merged.merge_timeline(3, 5, MergeUnit.STEP, {"lowcpu": ()})
    events = json.loads(open(path).read())
    steps = {e["args"]["step_num"] for e in events if e["name"] == "Step:ModeKeys.TRAIN"}
    assert steps == {"3", "4", "5"} and min(e.get("ts", 0) for e in events) >= 0
    with pytest.raises(UserError, match="no events between step 1000"):
        merged.merge_timeline(1000, 1001, MergeUnit.STEP)
    again = json.loads(open(merged.merge_timeline(3, 5, "step")).read())
    assert {e["args"]["step_num"] for e in again if e["name"] == "Step:ModeKeys.TRAIN"} == steps
    with pytest.raises(UserError, match="no events between time 3"):
        merged.merge_timeline(3, 5, "time")
    with pytest.raises(UserError, match="MergeUnit"):
        merged.merge_timeline(3, 5, "steps")


def test_frames(measured_run):
    pytest.importorskip("pandas")
    frame = tfbig.profiler.PandasFrame(measured_run)
    system, framework = frame.get_all_system_metrics(), frame.get_all_framework_metrics()
    assert list(system.columns) == (
        "timestamp timestamp_us value system_metric dimension nodeID type".split()
    )
    assert (framework["framework_metric"] == "Step:ModeKeys.TRAIN").sum() == 30
    assert len(frame.get_all_dataloader_metrics()) == 30
    _, chosen = frame.get_profiler_data_by_step(4, 6)
    assert {4, 5, 6} <= set(chosen["step"])
    analysis = tfbig.profiler.PandasFrameAnalysis(system, framework)
    job = analysis.get_job_statistics()
    parts = job["initialization"] + job["training_loop_duration"] + job["finalization"]
    assert parts == pytest.approx(job["job_duration"])
    by_phase = analysis.get_step_statistics()
    assert set(by_phase.index) == {"Step:ModeKeys.TRAIN", "Step:ModeKeys.EVAL"}
    assert by_phase.loc["Step:ModeKeys.TRAIN", "count"] == 30
    by_name = analysis.get_step_statistics(by=StatsBy.FRAMEWORK_METRICS)
    assert by_name.loc["GetNext", "count"] == 30
    assert "DataIterator" in analysis.get_step_statistics(by=StatsBy.PROCESS).index
    assert analysis.get_device_usage_stats().to_numpy().sum() == pytest.approx(1)
    assert analysis.get_device_usage_stats(Resource.GPU).empty
    assert len(analysis.get_utilization_stats("cpu")) in (2, 3)  # and the use of a quota
    both = analysis.get_utilization_stats([Resource.CPU, Resource.MEMORY])
    assert set(both.index.get_level_values("type")) == {"cpu", "memory"}
    inside = analysis.get_utilization_stats(
        Resource.CPU, by=StatsBy.TRAINING_PHASE, phase="Step:ModeKeys.TRAIN"
    )
    assert set(inside.index.get_level_values("training_phase")) == {"Step:ModeKeys.TRAIN"}
    all_of_them = analysis.get_utilization_stats(Resource.CPU)["count"].sum()
    assert 0 < inside["count"].sum() < all_of_them
    assert analysis.get_training_phase_intervals()["steps"].sum() == 30
    phases = analysis.get_training_phase_intervals(["Step:ModeKeys.TRAIN", "Step:ModeKeys.EVAL"])
    assert phases["steps"].sum() > 30


def test_frames_are_chosen_from(measured_run):
    pytest.importorskip("pandas")
    frame = tfbig.profiler.PandasFrame(measured_run)
    system, framework = frame.get_profiler_data_by_time(
        0, 4e15, selected_framework_metrics=["GetNext"], selected_system_metrics=["cpu0"]
    )
    assert set(framework["framework_metric"]) == {"GetNext"} and len(framework) == 30
    assert set(system["system_metric"]) == {"cpu0"}
    system, framework = frame.get_profiler_data_by_time(0, 4e15, get_system_metrics=False)
    assert system.empty and len(framework) > 60
    system, framework = frame.get_profiler_data_by_time(0, 4e15, get_framework_metrics=False)
    assert framework.empty and len(system) > 60
    for first, last, count in ((4, 4, 1), (6, 7, 3)):  # one request after the other
        _, framework = frame.get_profiler_data_by_step(first, last, cache_metrics=True)
        steps = framework[framework["framework_metric"] == "Step:ModeKeys.TRAIN"]["step"]
        assert steps.nunique() >= count and first in set(steps)


def test_what_ran_when_is_counted(measured_run):
    pandas = pytest.importorskip("pandas")
    frame = tfbig.profiler.PandasFrame(measured_run)
    framework = frame.get_all_framework_metrics()
    steps = framework[framework["framework_metric"] == "Step:ModeKeys.TRAIN"].iloc[8:10]
    lanes, names = frame.get_framework_metrics_by_begin_and_end_timesteps(
        list(steps["start_time"]), list(steps["end_time"])
    )
    assert "DataIterator" in lanes and "GetNext" in names
    assert max(lanes.values()) == max(names.values()) == 1
    one = steps.iloc[0]
    middle = one["start_time"] + (one["end_time"] - one["start_time"]) / 2
    _, _, phases = frame.get_framework_metrics_by_timesteps([middle, str(middle)])
    length = (one["end_time"] - one["start_time"]) / pandas.Timedelta(seconds=1)
    assert phases == {"Step:ModeKeys.TRAIN": pytest.approx(2 * length, rel=1e-3)}
    alone, _ = frame.get_framework_metrics_by_begin_and_end_timesteps(
        [one["start_time"]], [one["end_time"]], ["GetNext"]
    )
    assert alone == {"DataIterator": 1.0}


def test_arguments_stand_where_smdebugs_stand(measured_run):
    """Heatmap's second one is select_metrics."""
    reader = LocalSystemMetricsReader(measured_run / "profiler-output")
    heatmap = tfbig.profiler.Heatmap(reader, [], 0, None, [".*CPU"], ["cpu0"]).figure
    assert list(heatmap.data[0].y) == ["algo-1 CPUUtilization cpu0"]


def write_samples(folder, count: int) -> None:
    writer = SystemWriter(folder, "algo-1")
    for index in range(count):
        core = Metric("cpu", "CPUUtilization", "cpu0", index % 100)
        writer.write(6000 + index, [core, Metric("i/o", "", "IOPS", 5000)])
    writer.close()


def test_units_are_not_averaged():
    columns = (("memory", "", "MemoryUsedPercent"), ("i/o", "", "IOPS"), ("cpu", "C", "cpu0"))
    values = np.array([[50, 9000, 1], [60, 8000, np.nan]], np.float32)
    found = series_of([SystemTable("algo-1", np.array([1.0, 2.0]), columns, values, False)])
    totals = {one.dimension: one.values.tolist() for one in found if one.event == "total"}
    assert totals == {"MemoryUsedPercent": [50, 60], "IOPS": [9000, 8000], "C": [1]}
    assert [one.event for one in choose(found, ["^C$"], ["cpu"])] == ["cpu0"]


def test_long_runs_are_read_by_minutes(tmp_path):
    write_samples(tmp_path, 300)
    (table,) = read_system(tmp_path)
    assert len(table.times) == 300 and not table.by_minute
    (table,) = read_system(tmp_path, most_bytes=1000)
    assert len(table.times) == 5 and table.by_minute
    assert table.one("i/o", "", "IOPS").tolist() == [5000] * 5
    assert np.isnan(table.one("gpu", "", "none")).all()


def test_readers_bear_a_file_that_is_being_written(tmp_path):
    write_samples(tmp_path, 3)
    (path,) = tmp_path.glob("system/*/*/*.json")
    with open(path, "ab") as file:
        file.write(b'{"Type": "cp')
    reader = LocalSystemMetricsReader(tmp_path)
    assert len(reader.get_events(6001, 6002, TimeUnits.SECONDS, "cpu")) == 2
    path.write_bytes(b"damaged\n" + path.read_bytes())
    with pytest.raises(UserError, match="line 1"):
        reader.get_events(0, 1e12)
    folder = tmp_path / "framework/pevents"
    folder.mkdir(parents=True)
    lines = [
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "Lane"}},
        {"name": "a", "ph": "X", "pid": 1, "tid": 0, "ts": 5, "dur": 7, "args": {}},
    ]
    text = "[\n" + ",\n".join(map(json.dumps, lines)) + ',\n{"name": "b", "ph'
    (folder / "5_1-host_pythontimeline.json.tmp").write_text(text)
    reader = LocalAlgorithmMetricsReader(tmp_path)
    (event,) = reader.get_events(0, 1e12)
    assert (event.event_name, event.event_phase, event.end_time) == ("a", "Lane", 12_000)
    assert reader.get_timestamp_of_latest_available_file() == 12


def test_thinning_keeps_the_extremes():
    values = np.zeros(10_000)
    values[[1234, 7000]] = 5, -5
    times, kept = thin(np.arange(10_000), values, 100)
    assert len(times) <= 100 and kept.max() == 5 and kept.min() == -5 and (np.diff(times) > 0).all()
