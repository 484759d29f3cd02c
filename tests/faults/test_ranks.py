"""What befalls one rank ends the whole job, in bounded time, and says so; nothing saved is lost."""

import time

import pytest

from benchmarks.soak import processes_of
from tests.distributed.launch import horovodrun
from tfbig.checkpoint import list_checkpoints
from tfbig.checkpoint_reader import CheckpointReader
from tfbig.run_folder import read_events

WORKER = "tests/faults/fault_worker.py"


def run_with_fault(kind, folder, small_flags, *flags):
    """Trains on two ranks; after step 6 of rank 1 something happens. A checkpoint is of step 4."""
    common = ["--strategy=horovod", f"--run_dir={folder}", "--steps=4000", "--eval_every=0"]
    common += ["--checkpoint_every=4", "--notensorboard", "--log_every=1000", *flags]
    start = time.monotonic()
    done = horovodrun(2, [WORKER, kind, "1", "6", *small_flags, *common], timeout=500)
    print(f"{kind}: {time.monotonic() - start:.0f} s")
    assert done.returncode != 0, done.stdout
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
@pytest.mark.parametrize("kind", ["exit0", "short"])
def test_a_rank_that_leaves_early_ends_all(kind, tmp_path, small_flags):
    shown = run_with_fault(kind, tmp_path, small_flags)
    assert "rank 0 ends because another rank did" in shown
