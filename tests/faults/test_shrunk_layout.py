"""`tfbig launch` with real layouts: two stages of two shares fail, one stage of two takes over."""

import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.soak_runs import processes_of
from tests.distributed.launch import run
from tfbig.checkpoint import list_checkpoints
from tfbig.checkpoint_reader import CheckpointReader
from tfbig.run_folder import RunFolder, read_events, read_metrics

WORKER = "tests/faults/fault_worker.py"
HOROVODRUN = str(Path(sys.executable).parent / "horovodrun")
COMMON = ["--num_layers=2", "--optimizer=sgd", "--steps=9", "--eval_every=0", "--notensorboard"]
COMMON += ["--checkpoint_every=4", "--noasync_checkpoints", "--log_every=1000"]


@pytest.mark.distributed
def test_a_mesh_that_gets_nowhere_is_replaced_by_a_smaller_one(tmp_path, small_flags):
    """A rank is killed before step 7 of each start: one from step 0 on, one from step 4 on."""
    folder = tmp_path / "run"
    flags = [*small_flags, *COMMON, f"--run_dir={folder}", "--strategy=pipeline"]
    flags += ["--microbatches=2", "--tensor_parallel_degree=2"]
    smaller = [HOROVODRUN, "-np", "2", sys.executable, "-m", "tfbig.train", *flags]
    whole = [HOROVODRUN, "-np", "4", sys.executable, WORKER, "SIGKILL", "3", "6", *flags]
    launcher = [sys.executable, "-m", "tfbig.launch", "--restarts=5", "--restart_wait=0"]
    launcher += ["--shrink_after=1", f"--shrunk={shlex.join(smaller)}"]
    done = run([*launcher, "--", *whole, "--pipeline_parallel_degree=2"], timeout=400)
    assert done.returncode == 0 and not processes_of(folder), done.stdout
    assert done.stdout.count("newest checkpoint: step 4") == 2
    assert done.stdout.count("the smaller layout takes over") == 1
    starts = [event["reason"] for event in read_events(folder) if event["event"] == "start"]
    assert starts == ["new run", "resumed at step 4", "resumed at step 4"]
    records = {record["step"]: record for record in read_metrics(folder)}
    assert list(records) == list(range(1, 10))
    assert [records[step]["world_size"] for step in (4, 9)] == [4, 2]
    parallel = RunFolder(folder).read_config()["config"]["parallel"]
    assert (parallel["pipeline_parallel_degree"], parallel["tensor_parallel_degree"]) == (1, 2)
    for info in list_checkpoints(folder / "checkpoints"):
        CheckpointReader(info.path).verify()
    # One device, undisturbed.
    words = ["-m", "tfbig.train", *small_flags, *COMMON, f"--run_dir={tmp_path / 'single'}"]
    done = run([sys.executable, *words, "--strategy=single"], timeout=200)
    assert done.returncode == 0, done.stdout
    expected = [record["loss"] for record in read_metrics(tmp_path / "single")]
    losses = [record["loss"] for record in records.values()]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
