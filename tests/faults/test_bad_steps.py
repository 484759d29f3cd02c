"""Steps of NaN, Inf or a leaping loss: found, named, and treated as the policy says."""

import math
import re

import numpy as np
import pytest

from data_pipeline.dataset import TokenData
from tfbig import train
from tfbig.bad_steps import BadSteps
from tfbig.config import Config, replace_fields
from tfbig.errors import RunError, UserError
from tfbig.loop import Progress
from tfbig.replay import first_sample
from tfbig.run_folder import read_events, read_metrics

BAD_STEP, STEPS, GLOBAL_BATCH = 32, 34, 6
FIRST = (BAD_STEP - 1) * GLOBAL_BATCH
GOOD_SAMPLE = FIRST + 3
BAD_SAMPLES = set(range(FIRST, FIRST + GLOBAL_BATCH)) - {GOOD_SAMPLE}


def record(step, loss, norm=1.0, applied=True):
    return {"step": step, "loss": loss, "grad_norm": norm, "num_tokens": 9.0, "applied": applied}


def config_with(**fields) -> Config:
    return replace_fields(Config(), fields)


def test_the_limit_is_median_and_deviations_of_what_every_rank_knows():
    steps = BadSteps(config_with(spike_threshold=3.0, spike_window=6))
    losses = [4.0, 4.2, 3.8, 4.1, 3.9, 4.0, 90.0]
    for step, loss in enumerate(losses, 1):
        assert steps.limit(step) == 0 or step > 4  # half a window, and two steps late
        assert steps.judge(record(step, loss), 0.0) is None
    # At step 8 the losses up to step 6 count: median 4.0, MAD 0.1.
    assert steps.limit(8) == pytest.approx(4.0 + 3 * 1.4826 * 0.1)
    again = BadSteps(config_with(spike_threshold=3.0, spike_window=6), steps.losses())
    assert again.limit(8) == steps.limit(8)
    bad = steps.judge(record(8, 4.6, applied=False), 4.45)
    assert bad is not None and bad.reason == "the loss 4.6000 is above 4.4500"
    assert BadSteps(config_with(max_loss=5.0)).limit(1) == 5.0


def test_what_is_not_finite_is_bad_except_where_a_loss_scale_overflows():
    plain, scaled = BadSteps(Config()), BadSteps(config_with(precision="float16"))
    infinite = record(1, 4.0, math.inf, applied=False)
    assert "norm is inf" in plain.judge(infinite, 0.0).reason
    assert scaled.judge(infinite, 0.0) is None
    assert "loss is nan" in scaled.judge(record(1, math.nan, applied=False), 0.0).reason


def test_limits_on_how_many():
    steps = BadSteps(config_with(max_bad_steps=2, max_rollbacks=1))
    for step in (1, 2):
        bad = steps.judge(record(step, math.nan, applied=False), 0.0)
        steps.count(bad)
    steps.roll_back(bad, 0)
    with pytest.raises(RunError, match=r"rolled back to step 0 1 times"):
        steps.roll_back(bad, 0)
    bad = steps.judge(record(3, math.nan, applied=False), 0.0)
    with pytest.raises(RunError, match="3 of the last 3 steps are bad, more than --max"):
        steps.count(bad)


@pytest.fixture
def flags(small_flags, monkeypatch) -> list[str]:
    """Flags of a run five of whose samples are one token over and over."""
    real = TokenData._gather

    def gather(self, split, place, positions):
        batch = real(self, split, place, positions)
        if split == "train":
            rows = np.isin(positions, list(BAD_SAMPLES))
            batch["tokens"] = np.where(rows[:, None], 381, batch["tokens"]).astype(np.int32)
        return batch

    monkeypatch.setattr(TokenData, "_gather", gather)
    return [
        *small_flags,
        "--learning_rate=0.03",
        "--decay_steps=1000",
        "--eval_every=0",
        "--notensorboard",
        "--spike_threshold=4",
        "--spike_window=12",
        "--checkpoint_every=15",
        f"--steps={STEPS}",
    ]


def events_of(folder, kind):
    return [event for event in read_events(folder) if event["event"] == kind]


def contents(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_skip_names_the_samples_and_replay_shows_them(tmp_path, flags, capsys):
    folder = tmp_path / "run"
    flags = [*flags, f"--run_dir={folder}"]
    assert train._body(flags) == 0
    records = read_metrics(folder)
    assert [r["step"] for r in records if not r["applied"]] == [BAD_STEP]
    (event,) = events_of(folder, "bad_step")
    assert event["step"] == BAD_STEP and "is above" in event["reason"]
    assert (event["first_sample"], event["last_sample"]) == (FIRST, FIRST + 5)
    assert {worst["sample"] for worst in event["worst"][:5]} == BAD_SAMPLES
    assert sum(event["sources"].values()) == GLOBAL_BATCH
    assert set(event["sources"]) <= {"even", "odd"}
    before = contents(tmp_path)
    capsys.readouterr()
    assert train._body([*flags, f"--replay_step={BAD_STEP}"]) == 0
    shown = capsys.readouterr().out
    loss = records[BAD_STEP - 1]["loss"]
    assert "from step 30" in shown
    found = re.search(rf"step {BAD_STEP}: loss (\S+), ", shown)
    assert float(found[1]) == pytest.approx(loss, rel=1e-4)
    assert "SKIPPED" in shown and f"sample {event['worst'][0]['sample']}" in shown
    assert contents(tmp_path) == before


def test_rollback_leaves_out_what_lies_between(tmp_path, flags):
    flags = [*flags, f"--run_dir={tmp_path}", "--bad_step_policy=rollback"]
    assert train._body(flags) == 0
    (event,) = events_of(tmp_path, "rollback")
    assert (event["step"], event["to_step"]) == (BAD_STEP, 30)
    assert (event["first_sample"], event["last_sample"]) == (180, FIRST + 5)
    records = read_metrics(tmp_path)
    assert [r["step"] for r in records] == list(range(1, STEPS + 1)) and all(
        r["applied"] for r in records
    )
    assert records[-1]["consumed_samples"] == STEPS * 6 + 12
    assert [e["step"] for e in events_of(tmp_path, "checkpoint")] == [15, 30, STEPS]


def test_a_replay_takes_the_samples_that_the_rollback_left(tmp_path, flags, capsys):
    flags = [*flags, f"--run_dir={tmp_path}", "--bad_step_policy=rollback"]
    assert train._body(flags) == 0
    losses = {record["step"]: record["loss"] for record in read_metrics(tmp_path)}
    for step in (31, 33, BAD_STEP):
        capsys.readouterr()
        assert train._body([*flags, f"--replay_step={step}"]) == 0
        shown = capsys.readouterr().out
        assert f"replaying step {step} from step 30 and sample" in shown
        first = FIRST if step == BAD_STEP else FIRST + 6 + (step - 31) * 6
        assert f"samples {first} to {first + 5} (6)" in shown
        loss = float(re.search(rf"step {step}: loss (\S+), ", shown)[1])
        if step == BAD_STEP:  # not as it was made later, when it was good
            assert "SKIPPED" in shown and loss > losses[step] + 1
        else:
            assert loss == pytest.approx(losses[step], rel=1e-4)


def test_where_a_replay_begins():
    def rollback(to_step, first, last):
        return {"event": "rollback", "to_step": to_step, "first_sample": first, "last_sample": last}

    bad, start = {"event": "bad_step", "step": 12}, {"event": "start", "step": 10}
    at = Progress(10, 60)
    assert first_sample([], 12, at) == first_sample([start], 12, at) == 60
    once = [bad, rollback(10, 60, 71)]
    assert first_sample(once, 11, at) == 72 and first_sample(once, 12, at) == 60
    twice = [*once, bad, rollback(10, 60, 83)]
    assert first_sample(twice, 11, at) == 84 and first_sample(twice, 12, at) == 72
    # A process that starts again takes the samples that were left out.
    assert first_sample([*once, start], 11, at) == 60
    # The checkpoint was saved anew on the way from an older one.
    assert first_sample([*once, rollback(5, 30, 71)], 12, Progress(10, 102)) == 102
    # What happens after a later checkpoint is another way.
    assert first_sample([*once, rollback(15, 102, 113)], 11, at) == 72


def test_stop_ends_with_one_line(tmp_path, flags, capsys):
    with pytest.raises(SystemExit) as stop:
        train.main([*flags, f"--run_dir={tmp_path}", "--bad_step_policy=stop"])
    assert stop.value.code == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"step {BAD_STEP} is bad: the loss" in error
    assert f"--replay_step={BAD_STEP}" in error


def test_a_run_that_has_diverged_ends(tmp_path, small_flags):
    flags = [*small_flags, f"--run_dir={tmp_path}", "--steps=40", "--optimizer=sgd"]
    flags += ["--learning_rate=1e30", "--warmup_steps=0", "--clip_norm=0", "--max_bad_steps=3"]
    with pytest.raises(RunError, match="more than --max_bad_steps=3"):
        train._body([*flags, "--notensorboard"])
    assert len(events_of(tmp_path, "bad_step")) == 4


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--spike_window=1", "--spike_window=1 must be at least 2"),
        ("--hang_timeout=-1", "--hang_timeout=-1.0 must be at least 0"),
        ("--bad_step_policy=skp", "Did you mean skip?"),
    ],
)
def test_mistakes(flag, words, small_flags):
    with pytest.raises(UserError) as error:
        train._body([*small_flags, "--run_dir=nowhere", flag])
    assert words in str(error.value)
