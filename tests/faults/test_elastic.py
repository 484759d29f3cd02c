"""Ranks come and go while a run goes on: its losses are those of a run of fixed size."""

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.soak_runs import processes_of
from tests.distributed.launch import run
from tfbig.checkpoint import list_checkpoints
from tfbig.checkpoint_reader import CheckpointReader
from tfbig.run_folder import read_events, read_metrics

WORKER = "tests/faults/elastic_worker.py"
# Three names of this machine: when a rank is lost, its launcher gives up all of its host.
HOSTS = ["localhost:1", "127.0.0.1:1", "127.1:1"]
GLOBAL_BATCH = 8  # which three ranks don't divide
COMMON = ["--optimizer=sgd", "--steps=18", "--eval_every=0", "--checkpoint_every=8"]
COMMON += ["--notensorboard", "--log_every=1000", f"--global_batch={GLOBAL_BATCH}", "--noprofile"]


def elastic_run(folder: Path, hosts: list[str], plan: list[dict], flags: list[str]):
    """Trains under an elastic horovodrun; the plan says which ranks come and go."""
    beside = folder.parent / "launch"
    beside.mkdir()
    (beside / "hosts").write_text("".join(f"{host}\n" for host in hosts))
    (beside / "plan.json").write_text(json.dumps(plan))
    script = beside / "discover.sh"
    script.write_text(f"#!/bin/sh\ncat {beside / 'hosts'}\n")
    script.chmod(0o755)
    launcher = [str(Path(sys.executable).parent / "horovodrun"), "-np", str(len(hosts))]
    launcher += ["--min-np", "1", "--max-np", "3", "--network-interfaces", "lo"]
    launcher += ["--host-discovery-script", str(script)]
    common = ["--strategy=horovod", "--elastic", f"--run_dir={folder}", *COMMON]
    command = [*launcher, sys.executable, WORKER, str(beside / "plan.json"), *flags, *common]
    done = run(command, timeout=900)
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    assert not processes_of(folder)
    return done.stdout


def fixed_losses(folder: Path, flags: list[str]) -> dict[int, float]:
    """Returns the losses of the same run on one device."""
    words = ["-m", "tfbig.train", "--strategy=single", f"--run_dir={folder}", *flags, *COMMON]
    done = run([sys.executable, *words], timeout=300)
    assert done.returncode == 0, done.stdout
    return {record["step"]: record["loss"] for record in read_metrics(folder / "metrics.jsonl")}


def check_run(folder: Path, expected: dict[int, float], sizes: list[int]) -> list[dict]:
    """Compares a run's losses with those of fixed size; returns its events of the world."""
    records = {record["step"]: record for record in read_metrics(folder / "metrics.jsonl")}
    assert list(records) == list(expected)
    # No sample was left out and none came twice.
    assert all(r["consumed_samples"] == GLOBAL_BATCH * step for step, r in records.items())
    losses = np.array([records[step]["loss"] for step in expected])
    np.testing.assert_allclose(losses, list(expected.values()), rtol=1e-5)
    tokens = {record["num_tokens"] for record in records.values()}
    assert len(tokens) == 1, "rows that fill up have no token that counts"
    found = [record["world_size"] for record in records.values()]
    assert [size for i, size in enumerate(found) if i == 0 or size != found[i - 1]] == sizes
    events = [event for event in read_events(folder) if event["event"] == "world"]
    changes = [(event["previous_world_size"], event["world_size"]) for event in events]
    assert changes == list(itertools.pairwise(sizes))
    saved = list_checkpoints(folder / "checkpoints")
    assert saved[-1].step == len(expected)
    for info in saved:
        CheckpointReader(info.path).verify()
    assert not (folder / "heartbeats").exists()
    return events


@pytest.mark.distributed
def test_ranks_come_and_are_killed(tmp_path, small_flags):
    plan = [
        {"step": 4, "size": 1, "hosts": HOSTS[:2]},
        {"step": 8, "size": 2, "hosts": HOSTS},
        {"step": 13, "size": 3, "kill": [0, 1]},
    ]
    shown = elastic_run(tmp_path / "run", HOSTS[:1], plan, small_flags)
    expected = fixed_losses(tmp_path / "fixed", small_flags)
    events = check_run(tmp_path / "run", expected, [1, 2, 3, 1])
    assert [event["step"] for event in events] == [5, 9, 13]
    assert "3 replicas x 1 microbatches x 3 samples - 1 that fill up" in shown


@pytest.mark.distributed
def test_rank_0_is_killed_behind_a_step_and_a_host_is_taken_away(tmp_path, small_flags):
    plan = [
        {"step": 5, "size": 3, "kill_late": [0]},
        {"step": 11, "size": 2, "hosts": []},
    ]
    flags = [*small_flags, "--microbatches=2"]
    shown = elastic_run(tmp_path / "run", HOSTS, plan, flags)
    expected = fixed_losses(tmp_path / "fixed", flags)
    events = check_run(tmp_path / "run", expected, [3, 2, 1])
    # The others may have made the step, too, whose record rank 0 had not written yet.
    assert events[0]["step"] in (5, 6) and events[1]["step"] == 12
    assert events[0]["reason"] == "a rank was lost"
    assert "the new world is without this rank, which ends" in shown
    # A microbatch keeps its size.
    for line in ("3 replicas x 2 microbatches x 2 samples - 4", "1 replicas x 4 microbatches x 2"):
        assert line in shown
