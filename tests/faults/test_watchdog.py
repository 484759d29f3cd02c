"""A rank that makes no progress says where everything stands, and ends."""

import json
import subprocess
import sys
import time

import pytest

from tests.distributed.launch import environment
from tfbig.heartbeat import Heartbeats, Pulse, slowest_rank
from tfbig.metrics import StepTimes
from tfbig.run_folder import RunFolder, read_events
from tfbig.watchdog import Watchdog, ranks_behind

HUNG = """
import ctypes, sys, time
from tfbig import watchdog
from tfbig.run_folder import RunFolder
watchdog._MINUTE = 0.5
def wait_for_a_peer_that_never_comes():
    {how}
with watchdog.Watchdog(RunFolder(sys.argv[1]), 0, {size}, timeout=1.0) as dog:
    dog.pulse.enter("step", 7)
    wait_for_a_peer_that_never_comes()
"""


def run_hung(folder, how, size=1) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", HUNG.format(how=how, size=size), str(folder)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_hang_is_told_with_stacks_and_the_rank_that_is_behind(tmp_path):
    behind = Pulse()
    behind.enter("data", 6)
    Heartbeats(tmp_path / "heartbeats", 1, 2).write(behind)
    done = run_hung(tmp_path, "time.sleep(50)", size=2)
    assert done.returncode == 1
    report = (tmp_path / "hang-rank-00000.txt").read_text()
    for text in (done.stderr, report):
        assert "rank 0 of 2 made no progress" in text and "step 7, phase step" in text
        assert "rank 1 (host " in text and "is behind: step 6, phase data" in text
        assert "in wait_for_a_peer_that_never_comes" in text and "in _watch" in text
    (event,) = read_events(tmp_path)
    assert event["event"] == "hang" and event["step"] == 7


def test_a_thread_that_keeps_the_interpreter_to_itself_ends_as_well(tmp_path):
    done = run_hung(tmp_path, "ctypes.PyDLL(None).sleep(50)")
    assert done.returncode == 1
    assert "Timeout" in done.stderr and "in wait_for_a_peer_that_never_comes" in done.stderr


def test_progress_keeps_the_job_alive_and_nothing_stays(tmp_path):
    with Watchdog(RunFolder(tmp_path), 0, 1, timeout=3.0) as dog:
        for step in range(40):
            dog.pulse.enter("step", step)
            time.sleep(0.1)
        record = json.loads((tmp_path / "heartbeats" / "rank-00000.json").read_text())
        assert record["phase"] == "step" and record["step"] > 5
    assert not list(tmp_path.iterdir())


def test_a_disk_that_cannot_be_written_is_no_hang(tmp_path):
    (tmp_path / "heartbeats").write_text("in the way")
    with Watchdog(RunFolder(tmp_path), 0, 2, timeout=30.0) as dog:
        time.sleep(0.3)
        assert dog.pulse.slowest == {}


def beat(step, phase, now=100.0):
    return {"step": step, "phase": phase, "time": now, "host": "a", "pid": 9}


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ({0: beat(5, "step"), 1: beat(4, "step")}, "rank 1 (host a, pid 9) is behind: step 4"),
        ({0: beat(5, "step"), 1: beat(5, "data")}, "rank 1 (host a, pid 9) is behind"),
        ({0: beat(5, "step"), 1: beat(5, "step", 60.0)}, "rank 1 (host a, pid 9): its last"),
        ({0: beat(5, "step")}, "rank 1: no heartbeat"),
        ({0: beat(5, "step"), 1: beat(5, "step")}, "No rank is behind"),
    ],
)
def test_who_is_behind(records, words):
    (line,) = ranks_behind(records, 2, 100.0)
    assert line.startswith(words)


def test_the_slowest_rank_and_its_cause():
    def times(data, compute, communication):
        return {"data": data, "compute": compute, "communication": communication}

    quick = times(0.0, 1.0, 1.0)
    assert slowest_rank({0: quick}) == {}
    assert slowest_rank({0: quick, 1: times(0.9, 1.1, 0.0), 2: quick})["slowest_cause"] == "data"
    found = slowest_rank({0: quick, 1: quick, 2: times(0.0, 2.0, 0.0)})
    assert found == {"slowest_rank": 2, "slowest_cause": "compute", "slowest_seconds": 1.0}
    wire = times(0.0, 0.1, 2.0)
    assert slowest_rank({0: wire, 1: wire})["slowest_cause"] == "communication"
    pulse = Pulse()
    pulse.note_times(StepTimes(90.0, 0.5, {"data": 0.5}))
    assert pulse.times == {}  # the first step is mostly tracing
    pulse.note_times(StepTimes(2.0, 0.5, {"data": 0.5}))
    assert pulse.times == times(0.5, 1.0, 0.5)
