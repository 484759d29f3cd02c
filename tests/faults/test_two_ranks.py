"""What befalls one of two ranks in real training: both come to the same end. One launch for all."""

import json

import numpy as np
import pytest

from tests.distributed.launch import horovodrun
from tests.faults.test_bad_steps import BAD_SAMPLES, BAD_STEP, FIRST, GLOBAL_BATCH, STEPS
from tfbig.checkpoint import list_checkpoints
from tfbig.checkpoint_reader import CheckpointReader
from tfbig.profiler.step_table import read_steps
from tfbig.run_folder import read_events, read_metrics

WORKER = "tests/faults/runs_worker.py"
HOUR = 3600.0
# Of the bad step's samples all of rank 0's are bad, and not all of rank 1's.
SPIKE = "--learning_rate=0.03 --decay_steps=1000 --spike_threshold=4 --spike_window=12".split()
SPIKE += [f"--steps={STEPS}", "--eval_every=0", "--checkpoint_every=15"]
PLAIN = ["--steps=12", "--eval_every=0", "--checkpoint_every=5", "--hang_timeout=30"]
# Both ranks write a part of each checkpoint.
STOPPED = ["--steps=30", "--eval_every=3", "--checkpoint_every=3", "--shard_optimizer_state"]
# Where a signal comes to one rank, which one, and the steps after which the run may end.
SIGNALS = {
    "step": ("SIGTERM", 1, {7, 8}),
    "compile": ("SIGUSR1", 1, {1, 2}),
    "evaluation": ("SIGUSR1", 0, {3}),
    "save": ("SIGINT", 1, {4}),
}
POLICIES = ("skip", "rollback", "stop")


def plan_of(folder) -> list[dict]:
    leaps = {"4": [1, HOUR], "6": [0, -HOUR], "9": [1, -2 * HOUR]}
    runs = [
        {"name": "plain", "flags": PLAIN},
        {"name": "clock", "flags": PLAIN, "fault": {"kind": "clock", "leaps": leaps}},
        {
            "name": "slow",
            "flags": ["--steps=60", "--eval_every=0"],
            "fault": {"kind": "slow", "rank": 1},
        },
    ]
    for where, (name, rank, _) in SIGNALS.items():
        fault = {"kind": "signal", "where": where, "signal": name, "rank": rank}
        runs.append({"name": where, "flags": STOPPED, "fault": fault})
    for policy in POLICIES:
        fault = {"kind": "tokens", "samples": sorted(BAD_SAMPLES)}
        flags = [*SPIKE, f"--bad_step_policy={policy}"]
        runs.append({"name": policy, "flags": flags, "fault": fault})
    for run in runs:
        run["flags"] = [*run["flags"], f"--run_dir={folder / run['name']}"]
    return runs


@pytest.fixture(scope="module")
def seen(tmp_path_factory, small_flags):
    """The folder of the runs, and by run what each rank saw."""
    folder = tmp_path_factory.mktemp("two_ranks")
    runs = plan_of(folder)
    plan = {"flags": [*small_flags, "--strategy=horovod", "--notensorboard"], "runs": runs}
    plan["flags"].append("--log_every=1000")
    (folder / "plan.json").write_text(json.dumps(plan))
    done = horovodrun(2, [WORKER, str(folder / "plan.json")], timeout=900)
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    assert "Traceback" not in done.stdout, done.stdout
    found = {
        run["name"]: [
            json.loads((folder / f"{run['name']}-rank-{rank}.json").read_text()) for rank in (0, 1)
        ]
        for run in runs
    }
    return folder, found


@pytest.mark.distributed
@pytest.mark.parametrize("where", SIGNALS)
def test_a_signal_on_one_rank_has_both_save_and_leave_together(where, seen):
    folder, found = seen
    ranks = found[where]
    assert [rank["code"] for rank in ranks] == [143, 143]
    assert ranks[0]["steps"] == ranks[1]["steps"]  # both launched the same steps, no more
    (signalled,) = (rank["signalled"] for rank in ranks if "signalled" in rank)
    for rank in ranks:
        # What each sees when it leaves: the manifest is there.
        assert rank["saved"][-1] in SIGNALS[where][2] and rank["saved"][-1] == len(rank["steps"])
        assert rank["left"] - signalled < 90
    assert abs(ranks[0]["left"] - ranks[1]["left"]) < 5
    newest = list_checkpoints(folder / where / "checkpoints")[-1]
    CheckpointReader(newest.path).verify()
    assert len(list(newest.path.glob("part-*.safetensors"))) == 2
    events = [event["event"] for event in read_events(folder / where)]
    assert events[-3:] == ["checkpoint", "signal", "stop"]


def events_of(folder, kind):
    return [event for event in read_events(folder) if event["event"] == kind]


@pytest.mark.distributed
@pytest.mark.parametrize("policy", POLICIES)
def test_both_ranks_come_to_one_verdict_on_a_step_that_is_not_alike_on_them(policy, seen):
    folder, found = seen
    ranks = found[policy]
    assert ranks[0]["verdicts"] == ranks[1]["verdicts"]
    assert ranks[0]["steps"] == ranks[1]["steps"]
    ((step, reason),) = ranks[0]["verdicts"]
    assert step == BAD_STEP and "is above" in reason
    (event,) = events_of(folder / policy, "bad_step")
    assert (event["first_sample"], event["last_sample"]) == (FIRST, FIRST + GLOBAL_BATCH - 1)
    assert {worst["sample"] for worst in event["worst"][:5]} == BAD_SAMPLES
    records = read_metrics(folder / policy)
    if policy == "stop":
        assert all(f"step {BAD_STEP} is bad" in rank["error"] for rank in ranks)
        return
    assert [rank["code"] for rank in ranks] == [0, 0]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    if policy == "skip":
        assert [r["step"] for r in records if not r["applied"]] == [BAD_STEP]
    else:
        (back,) = events_of(folder / policy, "rollback")
        assert (back["step"], back["to_step"]) == (BAD_STEP, 30)
        assert [30, FIRST + GLOBAL_BATCH] in ranks[1]["steps"]
        assert records[-1]["consumed_samples"] == (STEPS + BAD_STEP - 30) * GLOBAL_BATCH


@pytest.mark.distributed
def test_the_slowest_rank_and_its_cause_are_in_the_metrics(seen):
    folder, _ = seen
    records = [r for r in read_metrics(folder / "slow") if "slowest_rank" in r]
    assert records, "no heartbeat of rank 1 was read in six seconds"
    last = records[-1]
    assert (last["slowest_rank"], last["slowest_cause"]) == (1, "data")
    assert 0.05 < last["slowest_seconds"] < 10


@pytest.mark.distributed
def test_a_clock_that_leaps_changes_nothing_but_the_times_of_records(seen):
    folder, found = seen
    assert [rank["code"] for rank in found["clock"]] == [0, 0]
    straight, leaping = read_metrics(folder / "plain"), read_metrics(folder / "clock")
    for name in ("step", "consumed_samples", "loss", "grad_norm"):
        values = [[record[name] for record in records] for records in (straight, leaping)]
        np.testing.assert_allclose(*values, rtol=1e-6)
    # The clock did leap under the run, and no time that was measured leapt with it.
    times = np.diff([record["time"] for record in leaping])
    assert times.min() < -HOUR / 2
    for record in leaping:
        assert 0 <= record["data_wait_seconds"] <= record["step_seconds"] < HOUR / 2
        assert all(0 <= s < HOUR / 2 for s in record["communication_seconds"].values())
    for event in events_of(folder / "clock", "checkpoint"):
        assert 0 <= event["seconds"] < HOUR / 2
    for rank in (0, 1):
        rows = read_steps(folder / "clock" / "profiler-output", rank)
        assert rows["step"].tolist() == list(range(1, 13))
        assert (rows["seconds"] < HOUR / 2).all() and (rows["seconds"] >= 0).all()
    assert not list((folder / "clock").glob("hang-*"))
    for name in ("plain", "clock"):
        infos = list_checkpoints(folder / name / "checkpoints")
        assert [info.step for info in infos][-1] == 12
        CheckpointReader(infos[-1].path).verify()
