"""Long runs, which are read by their minutes' quantiles: rules see what they see in samples."""

import numpy as np
import pytest

from benchmarks.synthetic_run import SyntheticRun
from tests.profiler.test_rules import FAULTS, make, set_gpus
from tfbig.profiler.rules.catalogue import look_at
from tfbig.profiler.run_data import read_run
from tfbig.profiler.system_table import SystemTable
from tfbig.profiler.system_writer import STATISTICS

HOST_RULES = (
    "BatchSize CPUBottleneck IOBottleneck LowGPUUtilization GPUMemoryIncrease LoadBalancing"
    " PinnedCore DataWorkers"
).split()


def by_minute(run: SyntheticRun, path) -> dict:
    """Returns the rules' findings of a run of which the samples are not read."""
    data = read_run(run.write(path, samples=False))
    assert all(table.by_minute for table in data.system)
    return {one.rule: one for one in look_at(data)}


@pytest.fixture
def few_bytes(monkeypatch):
    """Has every run read by its minutes."""
    from tfbig.profiler import run_data, system_table

    monkeypatch.setattr(
        run_data, "read_system", lambda output: system_table.read_system(output, most_bytes=0)
    )


@pytest.mark.parametrize(
    "rule, fault", [(n, f) for n, f in FAULTS if n in HOST_RULES], ids=lambda x: str(x)[:24]
)
def test_a_fault_fires_by_minutes_too(rule, fault, tmp_path, few_bytes):
    run = make()
    fault(run)
    one = by_minute(run, tmp_path / "run")[rule]
    assert one.triggered, one.evidence


def test_no_rule_fires_on_a_healthy_long_run(tmp_path, few_bytes):
    found = by_minute(make(), tmp_path / "run")
    assert [name for name, one in found.items() if one.triggered] == []


def test_swings_within_a_minute_are_seen(tmp_path, few_bytes):
    """The median of each minute is 100%: a GPU that is idle a third of the time looked busy."""
    run = make()
    set_gpus(run, "GPUUtilization", np.where(np.arange(run.num_samples) % 3 == 0, 0.0, 100.0))
    one = by_minute(run, tmp_path / "run")["LowGPUUtilization"]
    assert one.triggered and "swings from 5% to 100%" in one.evidence


@pytest.mark.parametrize("interval", (0.1, 0.5, 5.0))
def test_minutes_count_their_own_samples(interval, tmp_path, few_bytes):
    run = SyntheticRun(num_gpus=1, num_steps=600, interval=interval)
    data = read_run(run.write(tmp_path / "run", samples=False))
    (table,) = data.system
    minutes = len(table.times)
    assert table.num_samples == minutes * round(60 / interval)
    last = table.last(500)
    assert len(last.times) == min(minutes, -(-500 // round(60 / interval)))
    assert last.times[-1] == table.times[-1]


def test_percentiles_over_minutes():
    """One minute from 0 to 100%, one of 40%: half of the samples are 40."""
    even, flat = [0, 5, 50, 95, 100, 50], [40] * 6
    values = np.array([even, flat], float).T[:, :, None]  # (statistics, minutes, columns)
    table = SystemTable(
        "algo-1",
        np.array([30.0, 90.0]),
        (("gpu", "GPUUtilization", "gpu0"),),
        values[2],
        True,
        np.array([120, 60]),
        dict(zip(STATISTICS, values, strict=True)),
    )
    p5, p50, p95 = table.percentiles("gpu", "GPUUtilization", [5, 50, 95])[:, 0]
    assert p5 == pytest.approx(10, abs=3) and p50 == 40 and p95 == pytest.approx(90, abs=3)
    assert table.num_samples == 180 and len(table.last(60).times) == 1
    assert table.between(0, 60).statistics["mean"].tolist() == [[50]]
