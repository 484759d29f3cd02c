"""Constants of a machine from what its steps took; the fit finds what made the numbers."""

import json
import sys

import numpy as np
import pytest

from tfbig.errors import UserError
from tfbig.planner.cluster import Device
from tfbig.planner.kernels import Kernels
from tfbig.planner.layout import make_plan
from tfbig.planner.measure import (
    ShapeModel,
    _run,
    constants_of,
    fit_device,
    fit_overhead,
    least_squares,
    together_of,
    with_passes,
)
from tfbig.planner.measure_steps import MESH_SHAPES, SHAPES, config_of
from tfbig.planner.memory import Overhead, peak, predict_memory
from tfbig.planner.question import constants_path, request_of
from tfbig.planner.software import SOFTWARE


def machine_device(matmul: float, bandwidth: float, kernel: float) -> Device:
    """Returns a host with these constants."""
    return Device(
        name="here",
        peak={"float32": 50e9},
        memory_bytes=1e9,
        memory_bandwidth=10e9,
        link_bandwidth=1e9,
        watts=1.0,
        units=0,
        matmul=matmul,
        bandwidth=bandwidth,
        flash={"flash": matmul},
        kernel_seconds=kernel,
    )


def machine(matmul: float, bandwidth: float, kernel: float) -> dict:
    """Returns what a machine with these constants would print."""
    device = machine_device(matmul, bandwidth, kernel)
    rows = []
    for shape in SHAPES:
        tensors = peak(predict_memory(config_of(shape, 1), 1)).total
        rows.append({**shape, "seconds": ShapeModel(shape).seconds(device)})
        rows[-1]["peak_bytes"] = 0.45e9 + 1.3 * tensors
    return {
        "matrix_flops": {"float32": 50e9, "bfloat16": 20e9},
        "stream_bytes": 10e9,
        "steps": rows,
    }


@pytest.mark.parametrize("truth", [(0.8, 0.5, 1e-5), (0.4, 0.9, 5e-5)])
def test_the_fit_finds_the_constants_that_made_the_times(truth):
    device, error = fit_device(machine(*truth))
    assert error < 0.01
    found = (device.matmul, device.bandwidth, device.kernel_seconds)
    assert found == pytest.approx(truth, rel=0.1)


def test_the_fit_of_memory_finds_the_process_and_the_slack():
    overhead = fit_overhead(machine(0.8, 0.5, 1e-5)["steps"])
    assert overhead.context == pytest.approx(0.45e9, rel=1e-6)
    assert overhead.allocator == pytest.approx(0.3, rel=1e-6)


def test_what_passes_take_is_of_those_that_are_functions_of_their_own():
    def mesh(shape: dict) -> dict:
        return {**shape, "fields": {**shape["fields"], "strategy": "pipeline"}}

    def need(shape: dict, overhead: Overhead) -> float:
        return peak(predict_memory(config_of(shape, 1), 1, overhead=overhead)).total

    plain = Overhead(context=5e8)
    seen = [
        (mesh(s), need(mesh(s), plain) + m) for s, m in zip(MESH_SHAPES, (1e8, 3e8), strict=True)
    ]
    found = with_passes(plain, seen)
    assert found.passes == pytest.approx(2e8)
    for shape, more in ((mesh(SHAPES[0]), 2e8), (SHAPES[0], 0.0)):
        assert need(shape, found) - need(shape, plain) == pytest.approx(more, abs=1.0)


@pytest.mark.parametrize(
    ("fields", "copies"),
    [({"strategy": "pipeline"}, 0), ({"microbatches": 2}, 1), ({}, None)],
)
def test_gradients_are_added_to_totals_where_there_are_some(fields, copies):
    """Read twice and written; where not in place, a host's memory clears as many pages more."""
    device = machine_device(0.8, 0.5, 1e-5)

    def backward(values: dict) -> float:
        config = config_of({**SHAPES[0], "fields": SHAPES[0]["fields"] | values}, 1)
        return Kernels(config, 2, device, SOFTWARE["tfbig"], "none").block().backward

    size = 4 * 12 * 128**2
    added = 0.0 if copies is None else 3 * size / (10e9 * 0.5) + copies * 2 * size / 10e9
    assert backward(fields) - backward({}) == pytest.approx(added, rel=1e-6)


def test_least_squares_finds_a_minimum_in_a_valley():
    def residuals(v):
        return np.array([v[0] * v[1] - 6, 10 * (v[0] - 2)])

    assert least_squares(residuals, [1.0, 1.0]) == pytest.approx([2.0, 3.0], rel=1e-4)


def test_a_measured_machine_can_be_planned_for():
    with pytest.raises(UserError, match="not measured yet"):
        request_of({"cluster": "here:1"})
    saw = machine(0.8, 0.5, 1e-5)
    link = {"bandwidth": 2e9, "latency": 1e-4}
    constants = constants_of({1: saw}, fit_overhead(saw["steps"]), link, 16e9)
    with open(constants_path(), "w") as file:
        json.dump(constants, file)
    shape = SHAPES[1]
    values = {**shape["model"], **shape["fields"], "cluster": "here:1"}
    plan = make_plan(request_of(values))
    assert plan.step.total == pytest.approx(saw["steps"][1]["seconds"], rel=0.05)
    assert plan.peak_bytes == pytest.approx(saw["steps"][1]["peak_bytes"], rel=0.05)
    two = make_plan(request_of(values | {"cluster": "here:2"}))
    assert two.step.data_exposed > 0
    assert two.request.cluster.device.memory_bytes == 8e9
    half = make_plan(request_of(values | {"precision": "bfloat16"}))
    assert half.step.compute > 1.5 * plan.step.compute  # products at 20 GFLOP/s, not 50
    with pytest.raises(UserError, match="has no float16"):
        make_plan(request_of(values | {"precision": "float16"}))


def test_a_host_with_gpus_is_measured_without_them():
    """The numbers are kept as a CPU's."""
    program = "import json, os; print(json.dumps({'gpus': os.environ['CUDA_VISIBLE_DEVICES']}))"
    assert _run([sys.executable, "-c", program]) == [{"gpus": "-1"}]


def test_processes_beside_each_other_are_averaged_in_each_precision():
    answers = [
        {"matrix_flops": {"float32": x, "bfloat16": 2 * x}, "stream_bytes": x, "steps": []}
        for x in (1.0, 3.0)
    ]
    assert together_of(answers)["matrix_flops"] == {"float32": 2.0, "bfloat16": 4.0}
