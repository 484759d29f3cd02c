"""A real run beside its prediction: train's line after 20 steps, and `tfbig plan --check`."""

import json
from pathlib import Path

import pytest

from tests.planner.test_measure import machine
from tfbig.errors import UserError
from tfbig.planner.check import check_run
from tfbig.planner.measure import constants_of, fit_overhead
from tfbig.planner.prediction import device_name, measured_of
from tfbig.planner.question import constants_path, own_constants
from tfbig.run_folder import read_metrics


def trained(flags: list[str], folder: Path) -> None:
    from tfbig.flags import Flags
    from tfbig.planner.question import run_sections
    from tfbig.train import config_from, run

    words = [*flags, f"--run_dir={folder}", "--steps=24", "--strategy=single"]
    words += ["--eval_every=0", "--checkpoint_every=0", "--notensorboard"]
    assert run(config_from(Flags("train", run_sections(), "").parse(words)), []) == 0


def write_machine() -> None:
    saw, link = machine(0.5, 0.5, 2e-5), {"bandwidth": 2e9, "latency": 1e-4}
    constants = constants_of({1: saw}, fit_overhead(saw["steps"]), link, 8e9)
    Path(constants_path()).write_text(json.dumps(constants))


def test_a_run_is_compared_and_its_machine_recalibrated(small_flags, tmp_path, capsys):
    write_machine()
    trained(small_flags, tmp_path / "run")
    printed = capsys.readouterr().out
    [line] = [line for line in printed.splitlines() if line.startswith("predicted")]
    assert "s a step" in line and "measured" in line and "GB" in line
    prediction = json.loads((tmp_path / "run" / "prediction.json").read_text())
    assert prediction["num_devices"] == 1 and prediction["step_seconds"] > 0
    assert prediction["devices_per_node"] == 1

    text = check_run(str(tmp_path / "run"))
    assert "peak memory" in text and "written to" in text
    # With the recalibrated constants, the same run is met.
    again = check_run(str(tmp_path / "run"))
    step, memory = (
        next(row for row in again.splitlines() if row.startswith(name))
        for name in ("passes and update", "peak memory")
    )
    assert abs(float(step.split()[-1].rstrip("%"))) <= 10, again
    assert abs(float(memory.split()[-1].rstrip("%"))) <= 1, again


def test_without_a_measured_machine_train_predicts_tensors_only(small_flags, tmp_path, capsys):
    trained(small_flags, tmp_path / "run")
    assert "GB of tensors a rank" in capsys.readouterr().out
    with pytest.raises(UserError, match="not measured yet"):
        check_run(str(tmp_path / "run"))


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="not the folder of a run"):
        check_run(str(tmp_path))


def test_too_few_steps_are_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="has 0 steps"):
        measured_of(read_metrics(tmp_path))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("data sheet of NVIDIA A100-SXM4-40GB", "a100-40"),
        ("data sheet of NVIDIA A100-SXM4-80GB", "a100-80"),
        ("data sheet of NVIDIA H100 80GB HBM3", "h100-80"),
        ("data sheet of NVIDIA H200", "h200"),
        ("data sheet of Tesla T4", "t4"),
        ("data sheet of Tesla V100-SXM2-16GB", "v100-16"),
        ("measured matrix product", ""),
    ],
)
def test_devices_by_their_drivers_name(text, name):
    assert device_name(text, own_constants()) == name
