"""The planner against what others published; docs/planning.md explains each miss.

Bars: step time within 15% on 75% of the rows that nothing was fitted on, none over 30%; memory
within 10%. tests/planner/published_runs.py holds the rows and their sources.
"""

import pytest

from tests.planner.published_rows import BOUND, FITTED, MORE, REPORTED, TOO_LARGE
from tests.planner.published_runs import Run
from tfbig.config import count_parameters
from tfbig.planner.layout import make_plan
from tfbig.planner.memory import peak, predict_memory
from tfbig.planner.question import request_of
from tfbig.planner.step_time import StepModel
from trainers.partition import choose_partition

# Beyond 15%, each explained in docs/planning.md.
MISSES = {"V17", "V19", "V33", "V35", "V37", "V38"}
GIB = 2**30  # what nvidia-smi and allocators call GB


def step_seconds(run: Run) -> float:
    config = run.config()
    partition = choose_partition(config, run.rows, run.recompute)
    model = StepModel(config, run.machines(), run.options(), run.program(), partition)
    return model.predict().total


def gigabytes(run: Run) -> float:
    data = run.machines().num_devices // run.tensor // run.pipeline
    ranks = predict_memory(run.config(), data, run.options(), run.overhead())
    return peak(ranks).total / GIB


def error(run: Run) -> float:
    return step_seconds(run) / run.seconds - 1


@pytest.mark.parametrize("run", FITTED, ids=lambda run: run.name)
def test_fitted_rows_are_met(run):
    assert abs(error(run)) < 0.05


@pytest.mark.parametrize("run", BOUND, ids=lambda run: run.name)
def test_step_time_of_a_published_run(run):
    assert run.name in MISSES or abs(error(run)) < 0.15, f"{error(run):+.1%}"
    assert abs(error(run)) < 0.30


def test_three_quarters_of_the_rows_are_within_15_percent():
    near = {run.name for run in BOUND if abs(error(run)) < 0.15}
    rows = {run.name.split()[0] for run in BOUND}  # a row of the table may hold several runs
    missed = {run.name.split()[0] for run in BOUND if run.name not in near}
    assert 1 - len(missed) / len(rows) >= 0.75, missed
    assert missed == {name.split()[0] for name in MISSES}, "docs/planning.md explains others"


@pytest.mark.parametrize("run", MORE, ids=lambda run: run.name)
def test_rows_beyond_the_table(run):
    """H100s with a whole microbatch of 2 are the widest miss."""
    assert abs(error(run)) < (0.25 if run.name == "MPT-13B 64 H100" else 0.15), f"{error(run):+.1%}"


@pytest.mark.parametrize(
    "run", [run for run in BOUND + MORE if run.gigabytes], ids=lambda run: run.name
)
def test_memory_of_a_published_run(run):
    assert gigabytes(run) == pytest.approx(run.gigabytes, rel=0.10)


@pytest.mark.parametrize("run", TOO_LARGE, ids=lambda run: run.name)
def test_what_ran_out_of_memory_does_not_fit(run):
    assert gigabytes(run) * GIB > run.machines().device.memory_bytes


def test_blooms_layouts_are_in_the_measured_order_of_memory():
    rows = {run.name: run for run in BOUND}
    seen = [gigabytes(rows[name]) for name in ("V25", "V28", "V29")]
    assert seen == sorted(seen)
    assert seen[-1] * GIB < rows["V29"].machines().device.memory_bytes


def test_the_order_of_speed_within_bloom_is_the_measured_one():
    """Rank correlation over twelve layouts of one model on one machine."""
    runs = [run for run in BOUND + MORE if run.cluster == "a100-80:384" and run.gigabytes]
    predicted = [step_seconds(run) for run in runs]
    measured = [run.seconds for run in runs]
    pairs = [(i, j) for i in range(len(runs)) for j in range(i)]
    agree = sum((predicted[i] - predicted[j]) * (measured[i] - measured[j]) > 0 for i, j in pairs)
    assert agree / len(pairs) > 0.75


def test_rows_without_a_bar_have_a_prediction():
    """V100, and float8 on H100: docs/planning.md reports them."""
    for run in REPORTED:
        assert 0.4 < step_seconds(run) / run.seconds < 2.5, run.name


def test_sagemakers_claim():
    """175B at 32 samples/s on 120 ml.p4d.24xlarge, 25 days on 240.

    The claim names neither samples nor layout. Samples of 2048 tokens, tensor 8 x pipeline 12 x
    data 10, microbatches of 4, a batch of 960, full recomputation and unfused attention do it.
    """
    values = {
        "preset": "gpt3_175b",
        "precision": "float16",
        "software": "neox",
        "attention": "plain",
        "tensor_parallel_degree": 8,
        "pipeline_parallel_degree": 12,
        "microbatch_size": 4,
        "shard_optimizer_state": True,
        "activation_checkpointing": "block",
        "tokens": "300e9",
    }
    half = make_plan(request_of(values | {"cluster": "p4d.24xlarge:120", "global_batch": 960}))
    whole = make_plan(request_of(values | {"cluster": "p4d.24xlarge:240", "global_batch": 1920}))
    assert half.fits and whole.fits
    assert 960 / half.step.total == pytest.approx(32, rel=0.1)
    assert whole.economics.ideal_days == pytest.approx(25, rel=0.1)


def test_parameter_counts_are_the_printed_ones():
    """SC21's formula, arXiv 2104.04473, equation 2: P = 12 L h^2 (1 + 13/12h + (V + s)/12Lh)."""
    for run in BOUND[:5]:
        layers, width = run.layers, run.width
        formula = 12 * layers * width**2
        formula *= 1 + 13 / (12 * width) + (run.vocabulary + run.length) / (12 * layers * width)
        # The formula leaves out only the last norm's 2 h.
        assert count_parameters(run.config().model) == round(formula) + 2 * width
