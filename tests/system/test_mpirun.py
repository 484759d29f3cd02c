"""Open MPI's mpirun, for real: it starts the ranks, which talk by Gloo."""

import os
import sys
from pathlib import Path

import pytest

from tests.distributed.launch import REPOSITORY, free_ports, run
from tfbig.run_folder import read_metrics

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not os.environ.get("TFBIG_SYSTEM_TESTS"), reason="make test-system runs it"),
]


def test_the_script_trains_on_two_ranks(tmp_path, small_flags):
    (port,) = free_ports(1)
    environment = {"HOSTS": "localhost:2", "PYTHON": sys.executable, "PORT": str(port)}
    flags = [*small_flags, "--steps=3", "--eval_every=0", f"--run_dir={tmp_path / 'run'}"]
    done = run(["bash", str(REPOSITORY / "deploy/mpirun.sh"), *flags], 400, environment)
    assert done.returncode == 0, done.stdout
    assert "starts rank 1 of 2 on 1 host" in done.stdout
    assert len(read_metrics(tmp_path / "run/metrics.jsonl")) == 3


def test_ranks_that_mpirun_alone_starts_are_refused(tmp_path, small_flags):
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    train = [sys.executable, "-m", "tfbig.train", "--strategy=horovod", *small_flags]
    command = ["mpirun", *root, "--oversubscribe", "-np", "2", *train, f"--run_dir={tmp_path}/run"]
    done = run(command, 400)
    assert done.returncode == 2, done.stdout
    assert "OMPI_COMM_WORLD_SIZE=2, but this rank finds itself in a world of 1" in done.stdout
    assert not Path(tmp_path, "run").exists()
