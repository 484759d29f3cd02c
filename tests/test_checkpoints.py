"""`tfbig checkpoints` on real checkpoints."""

import numpy as np
import pytest

from tfbig import checkpoints
from tfbig.checkpoint_format import RunState, Slice
from tfbig.checkpoint_writer import CheckpointWriter
from tfbig.errors import UserError
from tfbig.run_lock import RunLock


@pytest.fixture
def run(tmp_path) -> str:
    writer = CheckpointWriter(tmp_path / "checkpoints")
    for step, loss in ((10, 2.0), (20, 1.5), (30, 1.75)):
        arrays = {"kernel": np.array([4.0, step], np.float32), "bias": np.ones(3, np.float32)}
        slices = [Slice(path, a.shape, (0,), a, True) for path, a in arrays.items()]
        state = RunState(
            consumed_samples=6 * step, config={"run": {"steps": step}}, metadata={"eval_loss": loss}
        )
        writer.save(step, slices, state)
    return str(tmp_path)


def test_list(run, capsys):
    assert checkpoints._body(["list", f"--run={run}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and "step       20" in lines[1]
    assert "in 1 files  120 samples  validation loss 1.5000" in lines[1]


def test_verify_names_what_is_damaged(run, capsys, tmp_path):
    assert checkpoints._body(["verify", f"--run={run}"]) == 0
    (part,) = (tmp_path / "checkpoints" / "step_00000020").glob("*.safetensors")
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    assert checkpoints._body(["verify", f"--run={run}"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert ["intact" in line for line in lines] == [True] * 3 + [True, False, True]
    assert "is damaged: its sha256" in lines[4]
    assert checkpoints._body(["verify", f"--run={run}", "--step=30"]) == 0


def test_diff(run, capsys):
    assert checkpoints._body(["diff", f"--run={run}"]) == 0
    shown = capsys.readouterr().out
    assert "config.run.steps: 20 -> 30" in shown and "consumed_samples: 120 -> 180" in shown
    assert "1 of 2 variables are equal bit by bit" in shown and "3.333e-01  kernel" in shown
    assert checkpoints._body(["diff", f"--run={run}", "--step=30", "--other_step=30"]) == 0
    assert "2 of 2 variables" in capsys.readouterr().out
    with pytest.raises(UserError, match="no checkpoint before it"):
        checkpoints._body(["diff", f"--run={run}", "--step=10"])
    with pytest.raises(UserError, match="no checkpoint of step 15: there are 10, 20, 30"):
        checkpoints._body(["diff", f"--run={run}", "--step=15"])


def test_a_difference_of_nan_is_infinite():
    first, second = np.array([1.0, np.nan]), np.array([1.0, 2.0])
    assert checkpoints.relative_difference(first, first) == 0.0
    assert checkpoints.relative_difference(first, second) == float("inf")


def test_prune_keeps_the_best_and_waits_for_no_job(run, capsys):
    with RunLock(run), pytest.raises(UserError, match="belongs to another job"):
        checkpoints._body(["prune", f"--run={run}", "--keep_last=1"])
    assert checkpoints._body(["prune", f"--run={run}", "--keep_last=1"]) == 0
    assert capsys.readouterr().out.endswith("kept steps 20, 30\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lst"], "Did you mean list?"),
        (["list"], "name the run's folder"),
        (["list", "--run=nowhere"], "--run=nowhere is not a folder: name a run folder"),
        (["prune", "--run=tests", "--keep_last=0"], "--keep_last=0 must be at least 1: "),
        (["prune", "--run=tests", "--keep_best=-1"], "--keep_best=-1 must be at least 0: "),
        (["prune", "--run=tests", "--keep_every=-1"], "--keep_every=-1 must be at least 0: "),
        (["diff", "--run=tests", "--num_variables=-1"], "--num_variables=-1 must be at least 0: "),
        (["verify", "--run=tests", "--step=-2"], "--step=-2 must be at least -1: "),
        (["list", "--run=tests"], "tests has no complete checkpoint yet: train it further"),
    ],
)
def test_mistakes(arguments, words):
    with pytest.raises(UserError) as error:
        checkpoints._body(arguments)
    assert words in str(error.value)
