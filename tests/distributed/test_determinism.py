"""With --deterministic, two runs and a resumed one are bit-equal, on every strategy."""

import sys
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.launch import horovodrun, run, run_cluster
from tfbig.checkpoint import list_checkpoints
from tfbig.checkpoint_reader import CheckpointReader
from tfbig.run_folder import RunFolder, read_metrics

WORKER = "tests/distributed/determinism_worker.py"
TIMEOUT = 900
FLAGS = ["--deterministic", "--eval_every=3", "--ema_decay=0.9", "--attention_dropout=0.1"]
FLAGS += ["--notensorboard", "--microbatches=2", "--global_batch=12"]


def launch(strategy: str, folder: Path, flags: list[str]) -> None:
    arguments = [WORKER, str(folder), *flags, *FLAGS, f"--strategy={strategy}"]
    if strategy == "mirrored":
        done = run([sys.executable, *arguments, "--num_devices=2"], TIMEOUT)
    elif strategy == "multi_worker":
        run_cluster(2, arguments, TIMEOUT)
        return
    else:
        if strategy == "pipeline":
            arguments += ["--pipeline_parallel_degree=2", "--num_layers=2"]
            arguments += ["--tensor_parallel_degree=2"]
        # With three ranks a sum may depend on which tensors are fused.
        done = horovodrun(3 if strategy == "horovod" else 4, arguments, TIMEOUT)
    assert done.returncode == 0, done.stdout


def last_state(run_dir: Path) -> CheckpointReader:
    return CheckpointReader(list_checkpoints(RunFolder(run_dir).checkpoints_dir)[-1].path)


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["mirrored", "multi_worker", "horovod", "pipeline"])
def test_runs_are_bit_equal(strategy, tmp_path, small_flags):
    launch(strategy, tmp_path, small_flags)
    # Stopping TensorFlow's profiler ends processes of its cluster now and then.
    is_captured = bool(list((tmp_path / "first/profiler-output").rglob("*.xplane.pb")))
    assert is_captured is (strategy != "multi_worker")
    first, state = read_metrics(tmp_path / "first"), last_state(tmp_path / "first")
    assert [record["step"] for record in first] == [1, 2, 3, 4, 5]
    assert len({record["loss"] for record in first}) == 5
    for name in ("second", "resumed"):
        other = read_metrics(tmp_path / name)
        for field in ("loss", "grad_norm", "source_loss", "learning_rate", "consumed_samples"):
            assert [r[field] for r in other] == [r[field] for r in first], (name, field)
        evaluations = [read_metrics(tmp_path / x, "eval")[-1] for x in ("first", name)]
        assert evaluations[0]["ema_loss"] == evaluations[1]["ema_loss"]
        assert evaluations[0]["ema_loss"] != evaluations[0]["loss"]
        reader = last_state(tmp_path / name)
        assert set(reader.paths()) == set(state.paths())
        for path in state.paths():
            np.testing.assert_array_equal(reader.read(path), state.read(path), err_msg=path)
