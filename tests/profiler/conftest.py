"""One measured run that many tests look at."""

from pathlib import Path

import pytest

from tfbig import train


@pytest.fixture(scope="session")
def measured_run(tmp_path_factory, small_flags) -> Path:
    """The folder of a run of 30 steps, resumed once after step 12."""
    folder = tmp_path_factory.mktemp("runs") / "measured"
    flags = [f"--run_dir={folder}", "--profile_interval_ms=100", "--eval_every=10"]
    flags += ["--tensor_stats_every=5", "--layer_grad_norms"]
    for steps in (12, 30):
        assert train._body([*small_flags, *flags, f"--steps={steps}"]) == 0
    return folder
