"""The clock of a schedule's operations against closed formulas, and against itself in full."""

import pytest

from tfbig.planner import timeline
from tfbig.planner.timeline import StageTimes, run_schedule
from trainers.pipeline_schedule import bubble_fraction


@pytest.mark.parametrize("schedule", ["1f1b", "simple"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 3), (4, 8), (8, 5), (8, 64)])
def test_the_bubble_of_equal_stages_is_the_formulas(schedule, ranks, microbatches):
    times = StageTimes([1.0] * ranks, [2.0] * ranks)
    seen = run_schedule(schedule, ranks, microbatches, times)
    assert seen.bubble == pytest.approx(bubble_fraction(ranks, microbatches))
    assert seen.seconds == pytest.approx(3 * (microbatches + ranks - 1))


def test_interleaving_divides_the_bubble():
    times = StageTimes([0.5] * 8, [1.0] * 8)
    seen = run_schedule("interleaved", 4, 16, times, num_chunks=2)
    assert seen.bubble == pytest.approx(bubble_fraction(4, 16, 2))


@pytest.mark.parametrize("schedule", ["1f1b", "simple", "interleaved"])
@pytest.mark.parametrize("microbatches", [64, 67, 200])
@pytest.mark.parametrize("transfer", [0.0, 0.2])
def test_a_long_step_is_its_beginning_and_repetitions(schedule, microbatches, transfer):
    """Unequal stages: what is extended equals what is simulated in full."""
    chunks = 2 if schedule == "interleaved" else 1
    forward = [1.0 + 0.1 * (index % 3) for index in range(4 * chunks)]
    forward[-1] = 1.7
    times = StageTimes(forward, [2.1 * value for value in forward])
    extended = run_schedule(schedule, 4, microbatches, times, chunks, transfer)
    full = timeline._simulate(schedule, 4, microbatches, times, chunks, transfer, False, 0)
    assert extended.seconds == pytest.approx(full.seconds, rel=2e-3)
    assert sum(extended.busy) == pytest.approx(sum(full.busy))


def test_the_slowest_stage_sets_the_pace():
    times = StageTimes([1.0, 1.0, 3.0, 1.0], [2.0, 2.0, 6.0, 2.0])
    seen = run_schedule("1f1b", 4, 100, times)
    assert seen.seconds == pytest.approx(9.0 * 100, rel=0.1)


def test_a_limit_on_active_microbatches_costs_time():
    times = StageTimes([1.0] * 4, [2.0] * 4)
    free = run_schedule("1f1b", 4, 16, times).seconds
    assert run_schedule("1f1b", 4, 16, times, active_microbatches=2).seconds > free


def test_transfers_delay_and_overlap_helps():
    times = StageTimes([1.0] * 4, [2.0] * 4)
    without = run_schedule("1f1b", 4, 8, times).seconds
    blocking = run_schedule("1f1b", 4, 8, times, transfer=0.1).seconds
    overlapping = run_schedule("1f1b", 4, 8, times, transfer=0.1, overlaps=True).seconds
    assert without < overlapping <= blocking


# Computed bubble rates of 1F1B, arXiv 2401.10241, table 5: p, m, rate.
@pytest.mark.parametrize(
    ("model", "ranks", "rows", "microbatches", "rate"),
    [
        ((22, 2304, 24), 8, 6, 24, 0.243),
        ((22, 2304, 24), 8, 6, 64, 0.124),
        ((46, 5120, 40), 16, 1, 48, 0.255),
        ((62, 6144, 48), 32, 1, 96, 0.265),
        ((62, 6144, 48), 32, 1, 256, 0.135),
    ],
)
def test_bubbles_of_the_zero_bubble_paper(model, ranks, rows, microbatches, rate):
    from tests.planner.published_runs import zero_bubble
    from tfbig.planner.step_time import StepModel
    from trainers.partition import choose_partition

    run = zero_bubble("", *model, ranks, rows, microbatches, 1.0, 0)
    config = run.config()
    partition = choose_partition(config, rows)
    step = StepModel(config, run.machines(), run.options(), run.program(), partition)
    # The paper schedules one duration a kind of pass, the profiled mean over stages.
    forward, backward = (sum(part) / ranks for part in step.stage_seconds()[:2])
    times = StageTimes([forward] * ranks, [backward] * ranks)
    seen = run_schedule("1f1b", ranks, microbatches, times, transfer=step.transfer_seconds())
    assert seen.bubble == pytest.approx(rate, abs=0.03)
