"""The chart is one file that needs nothing else, and shows where the memory wall stands."""

import pytest

from tfbig.errors import UserError
from tfbig.planner.chart import device_counts, make_figure, scaling, write_chart
from tfbig.planner.question import request_of

VALUES = {
    "preset": "gpt3_13b",
    "cluster": "a100-80:32",
    "global_batch": 256,
    "precision": "bfloat16",
    "software": "megatron-bf16",
}
# What it offloads is more than one node's memory.
LARGE = VALUES | {"preset": "gpt3_175b"}


def test_devices_double_up_to_16384():
    counts = device_counts(request_of(VALUES))
    assert counts[:5] == [1, 2, 4, 8, 16] and counts[-1] == 16_384


def test_the_page_is_self_contained(tmp_path):
    path = write_chart(request_of(LARGE), str(tmp_path / "chart.html"), most=32)
    page = open(path).read()
    assert "Plotly.newPlot" in page and "<script src=" not in page
    assert "memory wall" in page and "does not fit" in page


def test_the_wall_stands_where_nothing_fits():
    request = request_of(LARGE)
    counts = [1, 2, 8, 16]
    points = scaling(request, counts, weak=False)
    fits = [point.plan is not None for point in points]
    figure = make_figure(request, counts, {"strong scaling": points})
    [wall] = [trace for trace in figure.data if "memory wall" in trace.name]
    assert list(wall.y) == [request.cluster.device.memory_bytes / 1e9] * 4
    shapes = [shape for shape in figure.layout.shapes if shape.fillcolor == "red"]
    assert shapes and all(
        (shape.x0 < count < shape.x1) != fit
        for shape in shapes
        for count, fit in zip(counts, fits, strict=True)
    )
    # On a logarithmic axis a label stands at an exponent.
    labels = [note for note in figure.layout.annotations if note.text == "does not fit"]
    assert len(labels) == 2 and all(note.x == 0 for note in labels)


def test_strong_scaling_is_faster_and_weak_scaling_keeps_its_time():
    request = request_of(VALUES)
    strong = scaling(request, [16, 32, 64], weak=False)
    weak = scaling(request, [16, 32, 64], weak=True)
    times = [point.plan.step.total for point in strong]
    assert times == sorted(times, reverse=True)
    assert weak[-1].plan.step.total == pytest.approx(weak[0].plan.step.total, rel=0.25)
    assert weak[-1].plan.request.config.run.global_batch == 512
    alone = scaling(request_of(LARGE), [1], weak=False)[0]
    assert alone.plan is None and alone.least_bytes > 85e9


def test_a_file_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(UserError, match="cannot be written"):
        write_chart(request_of(VALUES), str(tmp_path / "no" / "chart.html"), most=16)
