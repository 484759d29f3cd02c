"""When a signal may come, and what a second one does."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.launch import environment
from tfbig import evaluation, train
from tfbig.checkpoint import list_checkpoints
from tfbig.checkpoint_reader import CheckpointReader
from tfbig.run_folder import read_events
from tfbig.run_state import StateKeeper
from trainers.replica import ReplicaTrainer

# The main thread waits in C, where no handler of Python's can run, as in a collective.
STUCK = """
import ctypes
from tfbig import stop_signal
stop_signal.AT_ONCE_AFTER = 1.0
library, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)
with stop_signal.StopSignal():
    library.pthread_mutex_lock(lock)
    print("stuck", flush=True)
    library.pthread_mutex_lock(lock)
"""


# A process that takes two seconds to save after SIGTERM.
SAVES = """
import signal, sys, time
def save(*_):
    time.sleep(2)
    open(sys.argv[1], "w").close()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.distributed
@pytest.mark.parametrize(("seconds", "saved"), [("30", True), ("0.5", False)])
def test_horovodrun_gives_its_processes_time_to_save(seconds, saved, tmp_path):
    command = [str(Path(sys.executable).parent / "horovodrun"), "-np", "1", sys.executable]
    process = subprocess.Popen(
        [*command, "-c", SAVES, str(tmp_path / "saved")],
        env=environment({"TFBIG_GRACE_SECONDS": seconds}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert any("ready" in line for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) != 0
        assert (tmp_path / "saved").exists() == saved
    finally:
        process.kill()
        process.communicate()


def test_only_a_late_second_signal_ends_a_stuck_process_at_once():
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout.readline() == b"stuck\n"
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)  # a scheduler's second one
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1.5)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(timeout=30) == 143
        assert b"ends without a save" in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


def signal_ourselves(function):
    """Returns the function, which first sends this process SIGTERM."""

    def wrapped(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        return function(*args, **kwargs)

    return wrapped


@pytest.mark.parametrize(
    ("where", "steps"), [("compile", {1, 2}), ("evaluation", {3}), ("save", {4})]
)
def test_a_signal_is_followed_by_one_step_at_most(where, steps, tmp_path, small_flags, monkeypatch):
    owner, name = {
        "compile": (ReplicaTrainer, "_train_graph"),
        "evaluation": (evaluation, "evaluate"),
        "save": (StateKeeper, "save"),
    }[where]
    monkeypatch.setattr(owner, name, signal_ourselves(getattr(owner, name)))
    flags = ["--steps=30", "--eval_every=3", "--checkpoint_every=3", "--notensorboard"]
    assert train._body([*small_flags, f"--run_dir={tmp_path}", *flags]) == 143
    newest = list_checkpoints(tmp_path / "checkpoints")[-1]
    assert newest.step in steps
    CheckpointReader(newest.path).verify()
    events = [event["event"] for event in read_events(tmp_path)]
    assert events[-3:] == ["checkpoint", "signal", "stop"]
