"""Like is compared with like: rank 0's parts, what an allocator counts, a run's own machines."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.planner.test_places import write_here
from tfbig import presets
from tfbig.config import Config, replace_fields, to_dict
from tfbig.errors import UserError
from tfbig.planner.check import check_run, recalibrate
from tfbig.planner.layout import Plan, make_plan
from tfbig.planner.memory import peak, predict_memory
from tfbig.planner.prediction import (
    Machines,
    Measured,
    compared,
    measurable_bytes,
    predict_run,
    request_for,
)
from tfbig.planner.prediction_hook import compared_line
from tfbig.run_folder import RunFolder

GPU = "data sheet of NVIDIA A100-SXM4-80GB"


def gpt2(**fields: object) -> Config:
    return replace_fields(presets.preset("gpt2_124m"), {"strategy": "horovod"} | fields)


def plan_of(config: Config, *machines: Any) -> Plan:
    return make_plan(request_for(config, Machines(*machines)))


def measured(plan: Plan, memory: float, compute: float = 1.0, data: float = 0.0) -> Measured:
    return Measured(plan.step.total, compute, {"data": data} if data else {}, 0.0, memory, 17)


def test_rank_0_is_compared_with_its_own_stage():
    """The last stage, which has the head, is the busiest here."""
    fields = {"strategy": "pipeline", "pipeline_parallel_degree": 4, "microbatches": 8}
    plan = plan_of(gpt2(partition="1,1,1,9", **fields), 4, GPU, 4)
    first, last = plan.step_of(0), plan.step_of(3)
    assert last == plan.step
    assert first.compute < last.compute / 3
    assert first.bubble > last.bubble
    seen = {name: value for name, value, _ in compared(plan, measured(plan, 1e9))}
    assert seen["passes and update"] == pytest.approx(first.compute + first.optimizer)
    assert seen["step"] == plan.step.total


def test_an_allocators_peak_is_compared_with_tensors_alone():
    config = gpt2(global_batch=16)
    plan = plan_of(config, 8, GPU, 8)
    tensors = peak(predict_memory(config, 8)).total
    assert measurable_bytes(plan) == pytest.approx(tensors)
    assert plan.memory[0].total > tensors + 1.65e9
    prediction = predict_run(config, Machines(8, GPU, 8))
    assert "(+0%)" in compared_line(prediction, measured(plan, tensors)).split("GB")[-1]


def test_a_gpus_tensors_say_nothing_of_its_process(tmp_path):
    plan = plan_of(gpt2(global_batch=16), 8, GPU, 8)
    for factor, share in ((1.2, 0.2), (0.9, 0.05)):  # what lies unused stays
        target = tmp_path / f"{factor}.json"
        recalibrate(plan, measured(plan, factor * measurable_bytes(plan)), target)
        overhead = json.loads(target.read_text())["devices"]["a100-80"]["overhead"]
        assert overhead == {"allocator_fraction": pytest.approx(share)}


def test_replicas_of_one_process_share_its_memory():
    write_here()
    alone = plan_of(gpt2(strategy="single", global_batch=8), 1)
    both = plan_of(gpt2(strategy="mirrored", global_batch=16), 2, "", 2)
    tensors = both.memory[0].total - both.memory[0].context
    assert measurable_bytes(alone) == alone.memory[0].total
    assert measurable_bytes(both) == pytest.approx(both.memory[0].context + 2 * tensors)


def test_a_run_is_predicted_for_the_hosts_that_it_has():
    one, two = (
        predict_run(gpt2(global_batch=16), Machines(8, GPU, per_node)) for per_node in (8, 4)
    )
    assert two["devices_per_node"] == 4
    assert two["step_parts"]["data_exposed"] > 1.2 * one["step_parts"]["data_exposed"]
    again = make_plan(request_for(gpt2(global_batch=16), Machines.of(two)))
    assert again.request.cluster.num_nodes == 2
    assert again.step.total == pytest.approx(two["step_seconds"])


def test_only_what_collectives_went_over_is_recalibrated(tmp_path):
    """Within a host that is its links, over several the network, of an instance if one is named."""
    config = gpt2(global_batch=16)
    cases = (
        (Machines(8, GPU, 8), "devices", "a100-80", "link_fraction"),
        (Machines(16, GPU, 8), "devices", "a100-80", "network_fraction"),
        (
            Machines(16, GPU, 8, "p4de.24xlarge:2"),
            "instances",
            "p4de.24xlarge",
            "network_fraction",
        ),
    )
    for number, (machines, table, row, name) in enumerate(cases):
        plan = make_plan(request_for(config, machines))
        target, spent = tmp_path / f"{number}.json", 2 * plan.step.data_exposed
        recalibrate(plan, measured(plan, 1e9, data=spent), target)
        network = json.loads(target.read_text())[table][row]["network"]
        usual = getattr(plan.request.cluster, name)
        assert network == {name: pytest.approx(usual / 2)}


def write_run(folder: Path, config: Config, machines: Machines) -> None:
    folder.mkdir()
    RunFolder(str(folder)).write_config(to_dict(config), ["train"], None)
    (folder / "prediction.json").write_text(json.dumps(machines.record()))
    record = {
        "kind": "train",
        "step_seconds": 1.0,
        "compute_seconds": 0.8,
        "communication_seconds": {"data": 0.1},
        "data_wait_seconds": 0.0,
        "peak_memory_bytes": 5e9,
    }
    lines = [json.dumps(record | {"step": step}) for step in range(8)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_check_takes_the_instances_that_a_run_had(tmp_path):
    folder = tmp_path / "run"
    write_run(folder, gpt2(global_batch=16), Machines(16, GPU, 8))
    own = tmp_path / "own.json"
    own.write_text("{}")
    text = check_run(str(folder), str(own), "p4de.24xlarge:2")
    assert "data axis" in text and "network share" in text
    assert "network" in json.loads(own.read_text())["instances"]["p4de.24xlarge"]
    with pytest.raises(UserError, match="has 8 devices, and the run ran on 16"):
        check_run(str(folder), str(own), "p4de.24xlarge:1")
