"""Ten kills of one of two ranks change nothing; `python -m benchmarks.soak` makes a hundred."""

from pathlib import Path

import pytest

from benchmarks.soak import soak


@pytest.mark.distributed
def test_ten_random_kills_change_nothing(tmp_path, small_flags):
    flags = [flag for flag in small_flags if not flag.startswith("--global_batch")]
    outcome = soak(Path(tmp_path), num_kills=10, num_ranks=2, flags=flags)
    assert outcome.problems == []
    assert outcome.kills.total() == 10, outcome.kills
