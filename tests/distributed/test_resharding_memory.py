"""Changing the layout of a checkpoint takes little more memory than what a rank holds of it."""

import json
import os
import sys

import pytest

from benchmarks.held_memory import HANDS_BACK
from tests.distributed.launch import run

WORKER = "tests/distributed/resharding_worker.py"


def resharded(folder, *sizes: int) -> dict[str, int]:
    arguments = [sys.executable, WORKER, str(folder), *map(str, sizes)]
    done = run(arguments, 600, HANDS_BACK)
    assert done.returncode == 0, done.stdout
    return json.loads(done.stdout.splitlines()[-1])


def test_a_small_model_takes_its_weights_and_little_besides(tmp_path):
    found = resharded(tmp_path, 512, 8)
    assert found["model_bytes"] > 100e6
    # Two models would be twice as much; buffers and graphs are some tens of MB.
    assert found["extra"] < found["model_bytes"] + 100e6


@pytest.mark.skipif(
    "TFBIG_HUGE" not in os.environ, reason="takes 3 GB of disk and a minute: set TFBIG_HUGE=1"
)
def test_one_gigabyte_takes_less_than_one_point_three(tmp_path):
    found = resharded(tmp_path, 1024, 19)
    assert found["model_bytes"] > 0.99e9
    assert found["extra"] < 1.3e9
