"""Every rule: a fault that makes it fire, and a healthy run where it doesn't."""

import dataclasses
import re
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.synthetic_run import SyntheticRun
from tfbig.config import Config, PrepareConfig
from tfbig.errors import UserError
from tfbig.profile_config import parse_steps
from tfbig.profiler.robust import jensen_shannon_distance, outliers, slope, with_hysteresis
from tfbig.profiler.rules.catalogue import RULES, description, look_at
from tfbig.profiler.run_data import read_run

REPORTING = {"OverallSystemUsage", "OverallFrameworkMetrics"}  # they never fire


def weight(name: str, step: int, **changes) -> dict:
    record = {
        "step": step,
        "name": name,
        "kind": "weight",
        "size": 100,
        "nonfinite": 0,
        "mean": 0.0,
        "mean_abs": 0.02,
        "std": 0.02,
        "min": -0.1,
        "max": 0.1,
        "p5_abs": 0.001,
        "p95_abs": 0.05,
        "zero_fraction": 0.0,
        "update_ratio": 0.01,
        "unchanged": False,
    }
    return record | changes


def tensors(**changes) -> list[dict]:
    """Statistics of two layers at steps 1, 5, 10, 15; `changes` are those of the second layer."""
    records = []
    for step in (1, 5, 10, 15):
        for layer in range(2):
            name = f"transformer_blocks/{layer}/att/qkv/kernel"
            changed = changes if layer else {}
            records.append(weight(name, step, **changed))
            records.append(weight(name, step, kind="gradient", **changed))
            activation = {"kind": "activation", "function": "relu"}
            activation["active_percentiles"] = np.linspace(0, 100, 101).tolist()
            records.append({"step": step, "name": f"{layer}/ffn", **activation, **changed})
    return records


def capture(exposed: float) -> dict:
    split = {"forward": 0.4, "backward": 0.6 - exposed, "exposed communication": exposed}
    return {"step": 5, "rank": 0, "wall_seconds": 1.0, "split": split, "operators": []}


def set_gpus(run: SyntheticRun, dimension: str, values, names=("gpu0", "gpu1")) -> None:
    for host in run.system:
        for name in names:
            host["gpu", dimension, name] = np.broadcast_to(values, run.num_samples).copy()


def set_cores(run: SyntheticRun, dimension: str, values, cores=range(4)) -> None:
    for host in run.system:
        for core in cores:
            host["cpu", dimension, f"cpu{core}"] = np.broadcast_to(values, run.num_samples).copy()


def batch_size(run):
    set_cores(run, "CPUUtilization", 30)
    set_gpus(run, "GPUUtilization", 40)
    set_gpus(run, "GPUMemoryUtilization", 40)


def cpu_bottleneck(run):
    set_cores(run, "CPUUtilization", 97, [0])
    set_gpus(run, "GPUUtilization", 3)


def io_bottleneck(run):
    set_cores(run, "I/OWaitPercentage", 70, [1])
    set_gpus(run, "GPUUtilization", 3)


def hidden_io_bottleneck(run):
    """Busy cores hide I/O wait; pressure shows it."""
    set_gpus(run, "GPUUtilization", 3)
    run.system[0]["pressure", "PressurePercent", "io_some"][:] = 80


def low_gpu(run):
    set_gpus(run, "GPUUtilization", 20)


def swinging_gpu(run):
    """The original's reading: use swings between 0 and 100%."""
    set_gpus(run, "GPUUtilization", 100.0 * (np.arange(run.num_samples) % 4 < 2))


def gpu_memory(run):
    set_gpus(run, "GPUMemoryUtilization", np.linspace(40, 60, run.num_samples))


def unbalanced(run):
    set_gpus(run, "GPUUtilization", 10, ["gpu1"])


def outlying_steps(run):
    run.seconds[50::20] *= 6


def late_start(run):
    run.seconds[0] = 1300


def few_readers(run):
    run.num_cores = 16
    run.data_wait[:] = 0.3 * run.seconds


def data_workers(run):
    set_cores(run, "CPUUtilization", 40)
    run.data_wait[:] = 0.2 * run.seconds


def straggler(run):
    run.communication[:] = 0.4 * run.seconds
    run.communication[2] = 0.05 * run.seconds


def pinned_core(run):
    set_cores(run, "CPUUtilization", 5)
    set_cores(run, "CPUUtilization", 99, [3])


def leak(run):
    run.resident[1] += 1.0 * np.arange(run.num_steps)


def spike(run):
    run.loss[200] += 2.0


def recompilation(run):
    run.compilations = [{"rank": 0, "step": 120, "seconds": 4.0, "functions": 3}]


def bubble(run):
    run.config.update(pipeline_parallel_degree=4, microbatches=4)
    run.bubble[:] = 0.4 * run.seconds


def exposed(run):
    run.captures = [capture(0.3)]


def flat_loss(run):
    run.loss[:] = 6 + 0.01 * np.random.default_rng(1).standard_normal(run.num_steps)


def not_finite(run):
    run.loss[100] = np.nan


def overfit(run):
    run.evaluations = [(step, 5.0, 1.0) for step in (100, 200, 300)]


def overtraining(run):
    run.evaluations = [(20 * i, max(4.0, 6.0 - 0.5 * i), 1.0) for i in range(1, 15)]


def stalled(run):
    run.seconds[100] = 2000


def padding(run):
    run.padding = 0.6


def vanishing_norms(run):
    run.layer_norms = np.full([run.num_steps, 4], 1e-9)  # embedding, two blocks, head


def with_tensors(**changes) -> Callable[[SyntheticRun], None]:
    def fault(run: SyntheticRun) -> None:
        run.tensors = tensors(**changes)

    return fault


FAULTS = [
    ("BatchSize", batch_size),
    ("CPUBottleneck", cpu_bottleneck),
    ("IOBottleneck", io_bottleneck),
    ("IOBottleneck", hidden_io_bottleneck),
    ("LowGPUUtilization", low_gpu),
    ("LowGPUUtilization", swinging_gpu),
    ("GPUMemoryIncrease", gpu_memory),
    ("LoadBalancing", unbalanced),
    ("StepOutlier", outlying_steps),
    ("MaxInitializationTime", late_start),
    ("Dataloader", few_readers),
    ("DataWorkers", data_workers),
    ("DataWait", data_workers),
    ("Straggler", straggler),
    ("PinnedCore", pinned_core),
    ("MemoryLeak", leak),
    ("LossSpike", spike),
    ("Recompilation", recompilation),
    ("PipelineBubble", bubble),
    ("ExposedCommunication", exposed),
    ("LossNotDecreasing", flat_loss),
    ("VanishingGradient", with_tensors(mean_abs=1e-9)),
    ("ExplodingTensor", not_finite),
    ("ExplodingTensor", with_tensors(nonfinite=1)),
    ("VanishingGradient", vanishing_norms),
    ("DeadRelu", with_tensors(active_percentiles=[0.5] * 60 + [40] * 41)),
    ("SaturatedActivation", with_tensors(function="gelu", active_percentiles=[0.5] * 101)),
    ("Overfit", overfit),
    ("Overtraining", overtraining),
    ("WeightUpdateRatio", with_tensors(update_ratio=50.0)),
    ("AllZero", with_tensors(zero_fraction=1.0)),
    ("UnchangedTensor", with_tensors(unchanged=True)),
    ("PoorWeightInitialization", with_tensors(std=1.0)),
    ("StalledTraining", stalled),
    ("NLPSequenceRatio", padding),
    ("TensorVariance", with_tensors(std=0.0)),
]


def make() -> SyntheticRun:
    run = SyntheticRun(num_ranks=4, num_gpus=2)
    run.tensors, run.captures = tensors(), [capture(0.02)]
    run.evaluations = [(step, float(run.loss[step - 1]) + 0.02, 1.0) for step in (100, 200, 300)]
    return run


def findings(run: SyntheticRun, path, settings=None) -> dict:
    return {one.rule: one for one in look_at(read_run(run.write(path)), settings)}


def test_no_rule_fires_on_a_healthy_run(tmp_path):
    found = findings(make(), tmp_path / "run")
    assert set(found) == set(RULES)
    assert [name for name, one in found.items() if one.triggered] == []
    looked = {name for name, one in found.items() if one.datapoints}
    assert set(RULES) - looked == {"PipelineBubble"}, "the others had something to look at"
    assert all(description(name).endswith(".") for name in RULES)


def test_a_fault_for_every_rule():
    assert {name for name, _ in FAULTS} == set(RULES) - REPORTING


@pytest.mark.parametrize("rule, fault", FAULTS, ids=[f"{n}-{f.__name__}" for n, f in FAULTS])
def test_a_fault_makes_its_rule_fire(rule, fault, tmp_path):
    run = make()
    fault(run)
    run.num_samples = len(next(iter(run.system[0].values())))
    one = findings(run, tmp_path / "run")[rule]
    assert one.triggered, one.evidence
    assert one.violations and one.datapoints and one.change and one.evidence
    assert 0 <= one.gain <= 1 and one.expected
    assert one.gain or one.benefit, "what the change brings"
    check_flags(one.change)
    assert set(one.to_dict()) >= {"RuleTriggered", "Violations", "Datapoints", "RuleParameters"}


def check_flags(change: str) -> None:
    """Checks that a change's flags exist and take the values that it proposes."""
    fields = {f.name: f for section in dataclasses.fields(Config) for f in section_fields(section)}
    fields |= {field.name: field for field in dataclasses.fields(PrepareConfig)}
    for name, value in re.findall(r"--(\w+)(?:=([^\s,;]*[^\s,;.)]))?", change):
        if name == "step":  # of tfbig.data inspect
            continue
        assert name in fields, f"--{name} in {change!r}"
        hint = str(fields[name].type)
        if value and hint in ("int", "float"):
            {"int": int, "float": float}[hint](value)
        elif value and name == "profile_steps":
            parse_steps(",".join(re.search(r"--profile_steps=(\S+)", change)[1].split(",")))


def section_fields(section):
    return dataclasses.fields(section.default_factory)


def test_outlying_steps_can_be_captured(tmp_path):
    run = make()
    outlying_steps(run)
    change = findings(run, tmp_path / "run")["StepOutlier"].change
    text = re.search(r"--profile_steps=(\S+)", change)[1]
    assert [list(part) for part in parse_steps(text)] == [[51], [71], [91]]


def test_a_balanced_pipeline_is_healthy(tmp_path):
    run = make()
    run.config.update(pipeline_parallel_degree=4, microbatches=32)
    run.bubble[:] = 0.09 * run.seconds
    one = findings(run, tmp_path / "run")["PipelineBubble"]
    assert one.datapoints and not one.triggered and "9% of the steps' time" in one.evidence


def test_a_quota_counts_as_the_whole(tmp_path):
    """Two cores' worth of time on 64 cores: in full use, which no core shows."""
    run = make()
    batch_size(run)
    set_cores(run, "CPUUtilization", 3)
    run.data_wait[:] = 0.2 * run.seconds
    found = findings(run, tmp_path / "cores")
    assert found["BatchSize"].triggered and found["DataWorkers"].triggered
    for host in run.system:
        host["cpu", "CPUQuotaUtilization", "quota"] = np.full(run.num_samples, 97.0)
    found = findings(run, tmp_path / "quota")
    assert not found["BatchSize"].triggered and not found["DataWorkers"].triggered


def test_losses_are_compared_as_many_steps_apart_as_asked(tmp_path):
    run = make()
    run.loss[150:165] *= 1.3
    assert findings(run, tmp_path / "run")["LossNotDecreasing"].triggered
    counts = {}
    for apart in ("10", "50"):
        settings = {"LossNotDecreasing_num_steps": apart}
        counts[apart] = findings(run, tmp_path / apart, settings)["LossNotDecreasing"].datapoints
    assert counts == {"10": 29, "50": 6}


def test_inactivity_is_a_parameter(tmp_path):
    run = make()
    run.tensors = tensors(active_percentiles=[3.0] * 101)
    assert not findings(run, tmp_path / "run")["DeadRelu"].triggered
    settings = {"DeadRelu_threshold_inactivity": "5"}
    assert findings(run, tmp_path / "run5", settings)["DeadRelu"].triggered


def test_parameters_are_replaced_by_name(tmp_path):
    run = make()
    set_cores(run, "I/OWaitPercentage", 70, [1])
    set_gpus(run, "GPUUtilization", 40)
    assert not findings(run, tmp_path / "run")["IOBottleneck"].triggered
    settings = {"IOBottleneck_gpu_threshold": "70"}
    assert findings(run, tmp_path / "again", settings)["IOBottleneck"].triggered
    for bad in ({"IOBottlenek_threshold": "1"}, {"IOBottleneck_x": "1"}, {"BatchSize_window": "w"}):
        with pytest.raises(UserError):
            findings(run, tmp_path / "bad", bad)


def test_the_straggler_is_named(tmp_path):
    run = make()
    straggler(run)
    one = findings(run, tmp_path / "run")["Straggler"]
    assert "rank 2 on host-1" in one.evidence and one.gain == pytest.approx(0.35, abs=0.05)


def test_robust_statistics():
    values = np.full(1000, 1.0)
    values[:20] = 100
    assert len(outliers(values, 3)) == 20, "a standard deviation would hide them"
    rise, share = slope(np.arange(100.0), 2 * np.arange(100.0) + np.tile([0, 5], 50))
    assert rise == pytest.approx(2, abs=0.1) and share > 0.9
    assert jensen_shannon_distance(np.array([1, 0]), np.array([0, 1])) == 1
    assert with_hysteresis(np.array([0, 91, 86, 91, 84, 88]), 90, 85).tolist() == (
        [False, True, True, True, False, False]
    )
