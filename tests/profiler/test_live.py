"""Rules of runs in training: what hangs or never begins is told of, by printing alone."""

import json
import time

import pytest

from benchmarks.synthetic_run import START, SyntheticRun
from tfbig.loop import Progress
from tfbig.profile_config import ProfileConfig
from tfbig.profiler.live import LiveRulesHook, live_hooks
from tfbig.profiler.rules.catalogue import look_at
from tfbig.profiler.run_data import read_run
from tfbig.run_folder import RunFolder, read_events


def begun(path, begin: float, *events: dict, num_steps: int = 0):
    """Writes a run that began and has not ended; `events` come after its start."""
    SyntheticRun(num_steps=max(1, num_steps)).write(path)
    start = {"event": "start", "reason": "new run", "time": begin, "process_start": begin}
    lines = [json.dumps(event) for event in (start, *events)]
    (path / "events.jsonl").write_text("\n".join(lines) + "\n")
    if not num_steps:
        (path / "metrics.jsonl").unlink()
    return path


def seen(path, now: float | None) -> dict:
    return {one.rule: one for one in look_at(read_run(path, now))}


def test_a_run_that_hangs_is_stalled(tmp_path):
    path = begun(tmp_path / "run", START, num_steps=5)
    last = read_run(path).train.of("time")[-1]
    assert not seen(path, None)["StalledTraining"].triggered, "it may be over"
    assert not seen(path, last + 1700)["StalledTraining"].triggered
    one = seen(path, last + 2000)["StalledTraining"]
    assert one.triggered and "the last sign of life was 2000.0 s ago" in one.evidence
    with open(path / "events.jsonl", "a") as file:
        file.write(json.dumps({"event": "stop", "reason": "done", "time": last + 1}) + "\n")
    assert not seen(path, last + 2000)["StalledTraining"].triggered


def test_a_first_step_that_never_comes_is_told_of(tmp_path):
    path = begun(tmp_path / "run", START)
    assert not seen(path, START + 60)["MaxInitializationTime"].triggered
    one = seen(path, START + 1300)["MaxInitializationTime"]
    assert one.triggered and "for 1300.0 s from the start no step came" in one.evidence


def test_a_process_that_died_before_its_first_step_counts(tmp_path):
    again = START + 2000
    path = begun(
        tmp_path / "run",
        START,
        {"event": "compile", "reason": "", "time": START + 1300, "seconds": 9},
        {"event": "start", "reason": "", "time": again, "process_start": again},
        {"event": "first_step", "reason": "", "time": again + 5},
        {"event": "stop", "reason": "done", "time": again + 9},
    )
    one = seen(path, None)["MaxInitializationTime"]
    assert one.triggered and "for 1300.0 s from the start no step came" in one.evidence


def test_printing_is_an_action_of_its_own(tmp_path, capsys):
    """No step is ever made, so no hook is called: a thread looks."""
    assert live_hooks(ProfileConfig(), tmp_path, lambda reason: None) == []
    path = begun(tmp_path / "run", time.time() - 3600)
    profile = ProfileConfig(print_rules=True, rule_seconds=0.1)
    (hook,) = live_hooks(profile, path, pytest.fail)
    hook.on_start(Progress(0, 0), False)
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and len(read_events(path)) < 3:
        time.sleep(0.1)
    hook.close()
    told = {event["rule"] for event in read_events(path) if event["event"] == "rule"}
    assert told >= {"MaxInitializationTime", "StalledTraining"}
    assert "rule StalledTraining: the longest silence was 36" in capsys.readouterr().out


def test_a_look_under_way_ends_with_the_run(tmp_path):
    profile = ProfileConfig(print_rules=True, rule_seconds=0.01)
    hook = LiveRulesHook(RunFolder(begun(tmp_path / "run", START)), profile, pytest.fail)
    hook.on_start(Progress(0, 0), False)
    time.sleep(0.3)  # the other process is starting
    begin = time.monotonic()
    hook.on_stop(Progress(0, 0), "done")
    assert time.monotonic() - begin < 5 and not hook._thread.is_alive()
