"""Runs with injected faults: the report's verdict names each."""

import http.server
import json
import os
import subprocess
import sys
import threading
import time

import psutil
import pytest

from tests.distributed.launch import horovodrun
from tests.profiler.faulty_train import SPIKE_STEP, spoil
from tfbig import report, train
from tfbig.profile_config import ProfileConfig
from tfbig.profiler.live import LiveRulesHook
from tfbig.profiler.metrics_readers import LocalAlgorithmMetricsReader
from tfbig.profiler.rules.catalogue import look_at
from tfbig.profiler.run_data import read_run
from tfbig.profiler.step_table import read_steps
from tfbig.profiler.system_table import read_lines
from tfbig.report import ReportConfig
from tfbig.run_folder import RunFolder, read_events, read_metrics


def verdict(run) -> list[str]:
    return json.loads(report.run(ReportConfig(format="json"), [str(run)]))["verdict"]


def line_of(found: list[str], rule: str) -> str:
    lines = [line for line in found if line.startswith(f"{rule}:")]
    assert lines, f"{rule} is missing in {found}"
    return lines[0]


def test_a_slow_disk_a_leak_a_spike_and_a_compile_are_named(tmp_path, small_flags):
    """One run with four faults; its batch grows in the middle, which compiles the step anew.

    In a process of its own: a leak counts by what the process holds, and this one holds much.
    """
    flags = ["--steps=70", "--eval_every=0", "--checkpoint_every=0", "--log_every=70"]
    flags += ["--batch_warmup_start=3", "--batch_warmup_samples=90", "--profile_interval_ms=100"]
    command = [sys.executable, "-m", "tests.profiler.faulty_train", *small_flags, *flags]
    done = subprocess.run(
        [*command, f"--run_dir={tmp_path / 'run'}"],
        env={**os.environ, "TFBIG_FAULTS": "slow_disk,leak,spike"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = verdict(tmp_path / "run")
    wait = line_of(found, "DataWait")
    assert "reading is too slow" in wait and "--data_workers=4" in wait
    assert "grows by" in line_of(found, "MemoryLeak")
    assert f"step {SPIKE_STEP}" in line_of(found, "LossSpike")
    sizes = [record["num_tokens"] for record in read_metrics(tmp_path / "run")]
    changed = sizes.index(6 * 32) + 1
    assert f"a compile in the middle: step {changed} " in line_of(found, "Recompilation")


def wait_until_quiet(seconds: float = 60.0) -> None:
    """Skips the test where others use the cores: then no core rests while another one is full."""
    deadline = time.monotonic() + seconds
    while max(use := psutil.cpu_percent(1.0, percpu=True)) > 25:
        if time.monotonic() > deadline:
            pytest.skip(f"others use the cores: {use}%")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core alone can't be pinned")
def test_a_pinned_core_is_named(tmp_path, small_flags):
    wait_until_quiet()
    flags = ["--steps=160", "--eval_every=0", "--checkpoint_every=0", "--log_every=160"]
    flags += ["--profile_interval_ms=100", "--profile_steps=", "--num_threads=1"]
    command = [sys.executable, "-m", "tests.profiler.faulty_train", *small_flags, *flags]
    done = subprocess.run(
        [*command, f"--run_dir={tmp_path / 'run'}"],
        env={**os.environ, "TFBIG_FAULTS": "pinned_core"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    last = max(os.sched_getaffinity(0))
    assert f"cpu{last} of algo-1 was full in " in line_of(verdict(tmp_path / "run"), "PinnedCore")


@pytest.mark.distributed
def test_a_slow_rank_is_named(tmp_path, small_flags):
    flags = ["--strategy=horovod", "--steps=25", "--eval_every=0", "--profile_steps=20-21"]
    command = ["-m", "tests.profiler.faulty_train", *small_flags, *flags]
    done = horovodrun(
        2, [*command, f"--run_dir={tmp_path / 'run'}"], 300, {"TFBIG_FAULTS": "slow_rank"}
    )
    assert done.returncode == 0, done.stdout
    assert "rank 1 on" in line_of(verdict(tmp_path / "run"), "Straggler")
    # Rank 0 computes nothing while it waits in the all-reduce for rank 1, which sleeps 0.6 s.
    captures = [
        [one["split"]["exposed communication"] for one in read_lines(path)]
        for path in sorted((tmp_path / "run/profiler-output/captures").glob("*.jsonl"))
    ]
    assert [len(steps) for steps in captures] == [2, 2]
    assert sum(captures[0]) > sum(captures[1]) + 0.4
    ranks = sorted((tmp_path / "run/profiler-output/steps").glob("*.json"))
    clocks = [json.loads(path.read_text()) for path in ranks]
    assert [clock["rank"] for clock in clocks] == [0, 1]
    for clock in clocks:  # one machine, one clock
        assert abs(clock["clock_offset_seconds"]) <= clock["clock_error_seconds"] + 1e-4


@pytest.mark.distributed
def test_a_pipelines_steps_are_told_apart(tmp_path, small_flags):
    """What two stages note of a real run: passes, bubbles and collectives fill the steps."""
    flags = ["--strategy=pipeline", "--pipeline_parallel_degree=2", "--microbatches=3"]
    flags += ["--num_layers=2", "--steps=12", "--eval_every=0", "--profile_steps=10"]
    command = ["-m", "tfbig.train", *small_flags, *flags, f"--run_dir={tmp_path / 'run'}"]
    done = horovodrun(2, command, 300)
    assert done.returncode == 0, done.stdout
    output = tmp_path / "run/profiler-output"
    for rank in range(2):
        rows = read_steps(output, rank)[1:]
        assert len(rows) == 11
        for name in ("forward", "backward", "bubble", "pipeline"):
            assert (rows[name] > 0).all(), name
        own = rows["forward"] + rows["backward"] + rows["bubble"]
        assert (own <= rows["seconds"] + 1e-3).all()
        (capture,) = read_lines(output / f"captures/rank-{rank:05d}.jsonl")
        split = capture["split"]
        assert sum(split.values()) == pytest.approx(capture["wall_seconds"], rel=1e-6)
        assert split["exposed communication"] > 0 and split["backward"] > 0
    found = {one.rule: one for one in look_at(read_run(tmp_path / "run"))}["PipelineBubble"]
    assert found.datapoints and "2 stages and 3 microbatches" in found.evidence
    events = LocalAlgorithmMetricsReader(output).get_events(0, 1e18)
    lanes = {(event.event_phase, event.tid) for event in events}
    assert {(lane, rank) for lane in ("Forward", "Backward", "Bubble") for rank in (0, 1)} <= lanes


def finding(rule: str, fired: int) -> dict:
    return {"RuleName": rule, "RuleTriggered": fired, "Evidence": "seen", "Change": "this"}


def test_rules_act_while_a_run_trains(tmp_path, capsys):
    """Said once, and again only after two quiet looks; told to a webhook; the run is stopped."""
    told = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    stops = []
    profile = ProfileConfig(
        rule_webhook=f"http://127.0.0.1:{server.server_address[1]}/", stop_on_rule=("MemoryLeak",)
    )
    hook = LiveRulesHook(RunFolder(tmp_path), profile, stops.append)
    for fired in (1, 1, 0, 1, 0, 0, 1):
        hook.act([finding("DataWait", fired), finding("MemoryLeak", 0)])
    assert not stops and capsys.readouterr().out.count("rule DataWait: seen") == 2
    hook.act([finding("MemoryLeak", 1)])
    hook.close()
    server.shutdown()
    thread.join()
    server.server_close()
    assert stops == ["rule MemoryLeak"]
    assert [one["RuleName"] for one in told].count("DataWait") == 2 and len(told) == 3
    assert [event["rule"] for event in read_events(tmp_path)] == [
        "DataWait",
        "DataWait",
        "MemoryLeak",
    ]


def test_a_rule_stops_a_run_that_saves(tmp_path, small_flags):
    mend = spoil(["slow_disk"])
    flags = ["--steps=100000", "--eval_every=0", "--checkpoint_every=0", "--rule_seconds=0.5"]
    flags += ["--stop_on_rule=DataWait", f"--run_dir={tmp_path / 'run'}", "--log_every=1000"]
    try:
        assert train._body([*small_flags, *flags]) == 143
    finally:
        mend()
    events = read_events(tmp_path / "run")
    assert [e["event"] for e in events][-2:] == ["signal", "stop"]
    assert "rule" in [e["event"] for e in events] and "checkpoint" in [e["event"] for e in events]
