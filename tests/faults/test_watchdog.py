"""A rank that makes no progress says where everything stands, and ends."""

import json
import subprocess
import sys
import threading
import time

import pytest

from tests.distributed.launch import environment
from tfbig.heartbeat import Heartbeats, Pulse, Silence, slowest_rank
from tfbig.metrics import StepTimes
from tfbig.run_folder import RunFolder, read_events
from tfbig.watchdog import Watchdog, parted_ranks, ranks_behind

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
    return run_code(HUNG.format(how=how, size=size), folder)


def run_code(code, folder) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_hang_is_told_with_stacks_and_the_rank_that_is_behind(tmp_path):
    behind, ended = Pulse(), threading.Event()
    behind.enter("data", 6)
    heartbeats = Heartbeats(tmp_path / "heartbeats", 1, 2)

    def beat_on() -> None:
        while not ended.wait(0.1):
            heartbeats.write(behind)

    thread = threading.Thread(target=beat_on)
    thread.start()
    done = run_hung(tmp_path, "time.sleep(50)", size=2)
    ended.set()
    thread.join()
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


def beat(step, phase, seconds=0.0):
    return {"step": step, "phase": phase, "seconds_in_phase": seconds, "host": "a", "pid": 9}


@pytest.mark.parametrize(
    ("records", "silent", "words"),
    [
        ({0: beat(5, "step"), 1: beat(4, "step")}, 0, "rank 1 (host a, pid 9) is behind: step 4"),
        ({0: beat(5, "step"), 1: beat(5, "data")}, 0, "rank 1 (host a, pid 9) is behind"),
        ({0: beat(5, "step"), 1: beat(5, "step")}, 40, "rank 1 (host a, pid 9): its last"),
        ({0: beat(5, "step")}, 0, "rank 1: no heartbeat"),
        ({0: beat(5, "step"), 1: beat(5, "step")}, 0, "No rank is behind"),
    ],
)
def test_who_is_behind(records, silent, words):
    (line,) = ranks_behind(records, 2, {0: 0.0, 1: silent})
    assert line.startswith(words)


def test_silence_is_what_the_reader_saw_whatever_the_clocks_say():
    silence = Silence()
    hour = 3600.0
    silence.note({0: {"time": 100.0}, 1: {"time": 100.0 - hour}}, now=0.0)
    silence.note({0: {"time": 102.0}, 1: {"time": 102.0 + hour}}, now=2.0)  # a clock that jumped
    silence.note({0: {"time": 102.0}, 1: {"time": 104.0 - hour}}, now=9.0)
    assert silence.seconds(now=10.0) == {0: 8.0, 1: 1.0}


CLOCKS = """
import sys, threading, time
from tfbig import heartbeat, watchdog
from tfbig.run_folder import RunFolder
real = time.time
offset = 0.0
time.time = lambda: real() + offset  # of what writes; nothing that reads may care
def beat_on():
    global offset
    other = heartbeat.Heartbeats(RunFolder(sys.argv[1]).heartbeats_dir, 1, 2)
    pulse = heartbeat.Pulse()
    pulse.enter("step", 7)
    while True:
        offset = {offset} if offset == 0.0 else 0.0
        other.write(pulse)
        time.sleep(0.1)
threading.Thread(target=beat_on, daemon=True).start()
with watchdog.Watchdog(RunFolder(sys.argv[1]), 0, 2, timeout=2.0) as dog:
    dog.pulse.enter("step", 7)
    time.sleep(50)
"""


@pytest.mark.parametrize("offset", [3600.0, -3600.0])
def test_clocks_that_jump_do_not_make_a_rank_seem_stopped(offset, tmp_path):
    done = run_code(CLOCKS.format(offset=offset), tmp_path)
    assert done.returncode == 1
    report = (tmp_path / "hang-rank-00000.txt").read_text()
    assert "No rank is behind: all 2 stand in the same step" in report
    assert "is stopped" not in report


def test_ranks_in_places_where_they_cannot_meet():
    short, others = beat(39, "evaluation", 31.0), beat(40, "step", 31.0)
    words = parted_ranks({0: others, 1: short, 2: others})
    assert "rank 1 is in the evaluation after step 39, rank 0 in step 40" in words
    assert "rank 0 is in the evaluation" in parted_ranks({0: short, 1: others})
    for one, other in [
        (short, beat(39, "step", 31.0)),  # not done with the step
        (short, beat(40, "step", 1.0)),  # just left the evaluation
        (beat(39, "evaluation", 1.0), others),
        (beat(39, "save", 99.0), others),  # it has no memory for a copy, and writes
        (beat(40, "evaluation", 99.0), beat(39, "step", 99.0)),
    ]:
        assert parted_ranks({0: one, 1: other}) == ""


STALLED = """
import sys, time
from tfbig import heartbeat, watchdog
from tfbig.run_folder import RunFolder
folder = RunFolder(sys.argv[1])
stopped = heartbeat.Pulse()
stopped.enter("step", 7)
heartbeat.Heartbeats(folder.heartbeats_dir, 0, 2).write(stopped)  # and never again
def stalled():
    time.sleep(1.0)
    return ["Horovod: rank 0 is missing from data.sums."]
with watchdog.Watchdog(folder, 1, 2, 1.0, stalled) as dog:
    dog.pulse.enter("step", 7)
    time.sleep(50)
"""


def test_without_rank_0_another_rank_tells_of_the_hang_and_its_collective(tmp_path):
    done = run_code(STALLED, tmp_path)
    assert done.returncode == 1
    report = (tmp_path / "hang-rank-00001.txt").read_text()
    for text in (done.stderr, report):
        assert "rank 0 (host " in text and "the process is stopped" in text
        assert "Horovod: rank 0 is missing from data.sums." in text
    (event,) = read_events(tmp_path)
    assert (event["event"], event["rank"], event["step"]) == ("hang", 1, 7)
    assert "missing from data.sums" in event["reason"]


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
