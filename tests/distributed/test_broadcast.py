"""What rank 0 begins with, all ranks begin with. Equal seeds would hide a missing broadcast."""

import re

import pytest

from tests.distributed.launch import horovodrun

WORKER = "tests/distributed/broadcast_worker.py"


@pytest.mark.distributed
def test_every_rank_begins_with_rank_0s_weights_and_optimizer_state():
    done = horovodrun(2, [WORKER], timeout=180)
    assert done.returncode == 0, done.stdout
    found = re.findall(r"rank (\d): (\d+) variables, not rank 0's: (.*)", done.stdout)
    assert sorted(rank for rank, _, _ in found) == ["0", "1"], done.stdout
    for rank, count, wrong in found:
        # 2 blocks and the rest of the model, its two slots and average of each, and scalars
        assert int(count) > 4 * 16 and wrong.strip() == "[]", (rank, wrong)
