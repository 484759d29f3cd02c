"""What benchmarks/soak.py and endurance.py conclude from what they have seen."""

import os
import subprocess
import sys
from collections import Counter

import orjson
import pytest

from benchmarks.endurance import Sample, growth_of
from benchmarks.failing_run import FAILURES, Failures
from benchmarks.soak import EVAL_EVERY, Assassin, Records, moment_to_seek
from benchmarks.soak_runs import ranks_of


def append(folder, *records: tuple[str, int]) -> None:
    with open(folder / "metrics.jsonl", "ab") as file:
        for kind, step in records:
            file.write(orjson.dumps({"kind": kind, "step": step, "loss": 4.0}) + b"\n")


def test_the_newest_step_is_one_of_this_start(tmp_path):
    append(tmp_path, ("train", 14), ("train", 15), ("eval", 15), ("train", 16))
    records = Records(tmp_path)
    assert records.newest() == (0, False)
    append(tmp_path, ("train", 11))
    assert records.newest() == (11, False)
    append(tmp_path, ("train", 15), ("eval", 15))
    assert records.newest() == (15, True)
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"kind": "train", "st')
    assert records.newest() == (15, True)


@pytest.mark.parametrize(
    ("steps", "unfinished", "moment"),
    [
        ([], False, "start-up"),
        ([7], False, "step"),
        ([7], True, "checkpoint"),
        ([EVAL_EVERY], False, "evaluation"),
    ],
)
def test_a_kill_counts_for_what_it_has_hit(steps, unfinished, moment, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    assassin = Assassin(tmp_path, None, 1, None, 1.0)
    append(tmp_path, *(("train", step) for step in steps))
    if unfinished:
        (tmp_path / "checkpoints" / "step_00000005").mkdir()
    assert assassin.hit() == moment


def test_moments_come_by_their_weights():
    kills: Counter = Counter()
    for _ in range(60):
        kills[moment_to_seek(kills)] += 1
    assert kills == {"start-up": 10, "step": 20, "checkpoint": 20, "evaluation": 10}


def test_a_launcher_is_no_rank(tmp_path):
    flag = f"--run_dir={tmp_path}"
    words = ([flag], ["horovodrun", flag], ["tfbig.launch", flag])
    code = "import time; print(flush=True); time.sleep(60)"
    processes = [
        subprocess.Popen([sys.executable, "-c", code, *own], stdout=subprocess.PIPE)
        for own in words
    ]
    try:
        for process in processes:
            assert process.stdout.readline()
        assert ranks_of(tmp_path) == [processes[0].pid]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def life(memory, descriptors, num_samples=80) -> list[Sample]:
    return [
        Sample(20 * at, int(2**30 * memory(at)), int(descriptors(at))) for at in range(num_samples)
    ]


def test_growth_is_what_comes_after_the_start():
    steady = life(lambda at: 0.5 + min(at, 30) / 60, lambda at: 9 + min(at, 20))
    growth = growth_of("rank 0", steady)
    assert growth.memory == 0 and growth.descriptors == 0
    leaking = life(lambda at: 1 + at / 100, lambda at: 9 + at / 5)
    growth = growth_of("rank 0", leaking)
    assert growth.memory > 0.2 and growth.descriptors > 5
    assert growth_of("rank 0", steady[:35]) is None


def test_a_failure_comes_once(tmp_path):
    failures = Failures(tmp_path / "notes", 10)
    kinds = [failures.kind_at(step) for step in range(1, 10 * len(FAILURES) + 1)]
    assert [kind for kind in kinds if kind] == list(FAILURES) and kinds[9] == FAILURES[0]
    assert failures.is_new(10, 0) and not failures.is_new(10, 0) and failures.is_new(10, 1)
    assert len(os.listdir(tmp_path / "notes")) == 2
