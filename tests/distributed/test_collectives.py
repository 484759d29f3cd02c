"""Collectives run as often as they are called, whatever a graph's optimizer makes of them."""

import collections
import json
import re

import pytest

from tests.distributed.launch import horovodrun

WORKER = "tests/distributed/collectives_worker.py"
SIZE, CALLS = 3, 3
# How often each name must have run. Stock Horovod runs the unused ones 0 times, the constant ones
# once, and one of the equal pair only.
RUNS = {
    "returned": CALLS,
    "assigned": CALLS,
    "of_a_variable": CALLS,
    "captured": CALLS,
    "unused": CALLS,
    "only_a_dependency": CALLS,
    "dropped_by_the_outer_function": CALLS,
    "in_a_loop": 2 * CALLS,
    "unused_in_a_loop": 2 * CALLS,
    "recomputed": 2 * CALLS,
    "equal_first": CALLS,
    "equal_second": CALLS,
    "constant": CALLS,
    "seeded": CALLS,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("collectives")
    done = horovodrun(SIZE, [WORKER, str(folder)], timeout=300)
    assert done.returncode == 0, done.stdout
    return folder


@pytest.fixture(scope="module")
def seen(folder) -> dict:
    return json.loads((folder / "seen.json").read_text())


@pytest.mark.distributed
def test_each_call_of_each_pattern_runs(folder):
    text = (folder / "timeline.json").read_text().rstrip().rstrip(",")
    events = json.loads(text if text.endswith("]") else text + "]")
    rows = {
        event["pid"]: event["args"].get("name", "")
        for event in events
        if event.get("name") == "process_name"
    }
    runs = collections.Counter(
        # TF appends a number when a name stands in a graph twice, as it does after recomputation.
        re.sub(r"_\d+$", "", rows[event["pid"]].removeprefix("world."))
        for event in events
        if event.get("ph") == "B" and event.get("name") == "ALLREDUCE"
    )
    assert {name: runs[name] for name in RUNS} == RUNS


@pytest.mark.distributed
def test_eager_calls_are_refused(seen):
    assert "inside tf.functions only" in seen["eager"]


@pytest.mark.distributed
def test_opposite_build_orders_complete_and_are_not_mixed_up(seen):
    assert seen["opposite"] == [1.0 * SIZE, 100.0 * SIZE]


@pytest.mark.distributed
@pytest.mark.parametrize("round_number", range(4))
def test_results(seen, round_number):
    """Ranks hold [0, 1, ... 5] + 10 x rank; this is what rank 0 got, in every round of sets."""
    results = seen[f"results_{round_number}"]
    total = [3.0 * index + 30.0 for index in range(6)]
    assert results["sum"] == total
    assert results["max"] == [20.0 + index for index in range(6)]
    assert results["bfloat16_sum"] == total
    # A sum, not Horovod's default of an average: rank 0's share of sum(x + 1).
    assert results["scattered"] == [total[0] + 3, total[1] + 3]
    assert results["bfloat16_scattered"] == [total[0] + 3, total[1] + 3]
    assert results["gathered"] == [2.0, 3.0, 12.0, 13.0, 22.0, 23.0]
    assert results["bfloat16_gathered"] == [0.0, 10.0, 20.0]
    assert results["int64_gathered"] == [1, 2, 3]
    assert results["broadcast"] == [13.0 + index for index in range(6)]
    assert results["bfloat16_broadcast"] == [13.0 + index for index in range(6)]
    if round_number % 2 == 0:  # rank 0 is of the pair {0, 2}
        assert results["exchanged"] == [[102.0, 0.5]]
        assert results["bfloat16_exchanged"] == [[102.0, 0.5]]
    else:
        assert "exchanged" not in results


@pytest.mark.distributed
def test_small_agreements(seen):
    assert seen["agreed"] == [3, 5, 12]
    assert seen["array"] == [7, 2]
    assert seen["alone"] == [5.0]


@pytest.mark.distributed
def test_a_late_rank_is_a_timeout_and_no_hang(seen):
    assert "waited 1 s for the other ranks" in seen["late"]
    assert 0.9 < seen["waited"] < 3.0
