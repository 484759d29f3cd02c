"""What befalls one rank ends the whole job, in bounded time, and says so; nothing saved is lost."""

import re
import sys
from pathlib import Path

import pytest

from benchmarks.soak_runs import processes_of
from tests.distributed.launch import horovodrun, run, seconds_since_fault
from tfbig.checkpoint import list_checkpoints
from tfbig.checkpoint_reader import CheckpointReader
from tfbig.run_folder import read_events, read_metrics

WORKER = "tests/faults/fault_worker.py"
PATIENCE = 90.0  # seconds from the fault to the job's end


def run_with_fault(kind, folder, small_flags, *flags, patience=PATIENCE):
    """Trains on two ranks; after step 6 of rank 1 something happens. A checkpoint is of step 4."""
    common = ["--strategy=horovod", f"--run_dir={folder}", "--steps=4000", "--eval_every=0"]
    common += ["--checkpoint_every=4", "--notensorboard", "--log_every=1000", *flags]
    done = horovodrun(2, [WORKER, kind, "1", "6", *small_flags, *common], timeout=500)
    seconds = seconds_since_fault(done.stdout)
    print(f"{kind}: the job has ended {seconds:.0f} s after it")
    assert done.returncode != 0 and seconds < patience, done.stdout
    assert not processes_of(folder)
    saved = list_checkpoints(folder / "checkpoints")
    assert saved and saved[0].step == 4
    for info in saved:
        CheckpointReader(info.path).verify()
    return done.stdout


@pytest.mark.distributed
def test_a_stopped_rank_is_named_by_the_others_watchdog(tmp_path, small_flags):
    shown = run_with_fault("stop", tmp_path, small_flags, "--hang_timeout=20")
    assert "rank 0 of 2 made no progress" in shown
    assert "rank 1 (host " in shown and "the process is stopped, or its host is gone" in shown
    assert "train_step" in (tmp_path / "hang-rank-00000.txt").read_text()
    assert read_events(tmp_path)[-1]["event"] == "hang"


@pytest.mark.distributed
def test_a_rank_that_leaves_early_ends_all(tmp_path, small_flags):
    shown = run_with_fault("exit0", tmp_path, small_flags)
    assert "rank 0 ends because another rank did" in shown


@pytest.mark.distributed
def test_a_rank_a_step_short_ends_all_though_nobody_is_dead(tmp_path, small_flags):
    """Rank 1 takes step 7 for the last one, and waits for the others in the evaluation."""
    shown = run_with_fault("short", tmp_path, small_flags, "--hang_timeout=400", patience=120)
    assert "rank 1 is in the evaluation after step 7, rank 0 in step 8" in shown
    assert "rank 1 ends because another rank did" in shown
    (event,) = [event for event in read_events(tmp_path) if event["event"] == "hang"]
    report = (tmp_path / "hang-rank-00000.txt").read_text()
    for text in (report, event["reason"]):
        # The collectives, by Horovod's own words: each rank is missing from the other's.
        assert "Horovod: rank 0 is missing from world.agree_max." in text
        assert "Horovod: rank 1 is missing from " in text
    saw = [event["time"] for event in read_events(tmp_path)]
    # 30 s until it is sure, and at most another 30 until Horovod speaks of it.
    assert saw[-1] - read_metrics(tmp_path)[-1]["time"] < 90


@pytest.mark.distributed
def test_a_signal_to_one_rank_ends_the_job_as_one_to_the_launcher_would(tmp_path, small_flags):
    """The processes themselves leave, under both launchers, which start nothing again."""
    flags = ["--strategy=horovod", f"--run_dir={tmp_path}", "--steps=4000", "--eval_every=0"]
    flags += ["--notensorboard", "--log_every=1000", *small_flags]
    launcher = [sys.executable, "-m", "tfbig.launch", "--restarts=3", "--restart_wait=0", "--"]
    launcher += [str(Path(sys.executable).parent / "horovodrun"), "-np", "2", sys.executable]
    done = run([*launcher, WORKER, "SIGTERM", "1", "6", *flags], timeout=400)
    assert seconds_since_fault(done.stdout) < PATIENCE
    left = re.findall(r"left with code (\d+) at ([\d.]+)", done.stdout)
    assert [code for code, _ in left] == ["143", "143"], done.stdout
    assert abs(float(left[0][1]) - float(left[1][1])) < 5
    (saved,) = list_checkpoints(tmp_path / "checkpoints")
    assert saved.step in (7, 8)
    CheckpointReader(saved.path).verify()
    events = [event["event"] for event in read_events(tmp_path)]
    assert events.count("start") == 1 and events[-3:] == ["checkpoint", "signal", "stop"]
    assert done.returncode == 143 and not processes_of(tmp_path)
