"""Step time against devices, strong and weak scaling, with the memory wall; one HTML file."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfbig.durable_file import write_atomic
from tfbig.errors import UserError
from tfbig.planner.layout import Plan, Request
from tfbig.planner.report import layout_line
from tfbig.planner.search import best_plans, least_bytes

MOST_DEVICES = 16_384
_TRIED = 5  # layouts simulated a point


@dataclass(frozen=True)
class Point:
    """The best layout on so many devices.

    Args:
      num_devices: ranks.
      plan: None where nothing fits.
      least_bytes: a device needs in the leanest layout; infinity where none divides the devices.
    """

    num_devices: int
    plan: Plan | None
    least_bytes: float


def device_counts(request: Request, most: int = MOST_DEVICES) -> list[int]:
    """Returns 1, 2, 4, ... devices, whole nodes from one node on."""
    node = request.cluster.devices_per_node
    counts = [n for n in (1, 2, 4, 8, 16) if n < node]
    while not counts or counts[-1] * 2 <= most:
        counts.append(node if not counts or counts[-1] < node else counts[-1] * 2)
    return counts


def scaling(request: Request, counts: Sequence[int], weak: bool) -> list[Point]:
    """Returns the best layout by number of devices.

    Args:
      request: with the global batch that its own cluster trains.
      counts: of devices.
      weak: the batch grows with the devices, from the request's at its own number of devices.
    """
    own, batch = request.cluster.num_devices, request.config.run.global_batch
    points = []
    for count in counts:
        moved = dataclasses.replace(request, cluster=request.cluster.with_devices(count))
        if weak:
            moved = moved.with_fields(global_batch=max(1, batch * count // own))
        points.append(_point(moved))
    return points


def _point(request: Request) -> Point:
    best: Plan | None = None
    with contextlib.suppress(UserError):  # nothing fits
        best = best_plans(request, show=1, simulated=_TRIED)[0][0]
    least = least_bytes(request)
    return Point(request.cluster.num_devices, best, least)


def write_chart(request: Request, path: str, most: int = MOST_DEVICES) -> str:
    """Writes the chart and returns its path; the file needs nothing else to be shown.

    Raises:
      UserError: no number of devices fits, or the file cannot be written.
    """
    if not Path(path).absolute().parent.is_dir():
        raise UserError(f"--chart={path} cannot be written: its folder does not exist.")
    counts = device_counts(request, most)
    curves = {
        "strong scaling: one batch": scaling(request, counts, weak=False),
        "weak scaling: batch grows": scaling(request, counts, weak=True),
    }
    if not any(point.plan for points in curves.values() for point in points):
        raise UserError(f"the model fits no number of {request.cluster.device.name} up to {most}.")
    figure = make_figure(request, counts, curves)
    try:
        write_atomic(path, figure.to_html(include_plotlyjs=True).encode())
    except OSError as error:
        raise UserError(f"--chart={path} cannot be written: {error}") from None
    return path


def make_figure(request: Request, counts: Sequence[int], curves: Mapping[str, list[Point]]) -> Any:
    """Returns the two panels: seconds a step and bytes a device.

    Args:
      request: whose cluster's device and batch are named.
      counts: of devices.
      curves: points of each count, by name; the first ones' memory is the wall's.
    """
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    titles = ("seconds a step", "GB a device")
    figure = make_subplots(
        rows=2, cols=1, shared_xaxes=True, subplot_titles=titles, vertical_spacing=0.08
    )

    def draw(row: int, x: Sequence[float], y: Sequence[float], **style: Any) -> None:
        figure.add_trace(Scatter(x=list(x), y=list(y), **style), row, 1)

    first: tuple[int, Plan] | None = None
    for name, points in curves.items():
        drawn = [(point.num_devices, point.plan) for point in points if point.plan is not None]
        first = first or (drawn[0] if drawn else None)
        x = [count for count, _ in drawn]
        texts = [f"{layout_line(plan.request)}<br>MFU {plan.mfu:.1%}" for _, plan in drawn]
        draw(1, x, [plan.step.total for _, plan in drawn], text=texts, name=name)
        used = [plan.peak_bytes / 1e9 for _, plan in drawn]
        draw(2, x, used, text=texts, name=f"memory, {name}")
    if first is not None:
        count, plan = first
        ideal = [plan.step.total * count / n for n in counts]
        draw(1, counts, ideal, name="ideal", line={"dash": "dot"})
    _draw_wall(figure, draw, request, next(iter(curves.values())))
    config = request.config
    figure.update_xaxes(type="log")
    figure.update_xaxes(title_text="devices", row=2, col=1)
    figure.update_yaxes(type="log")
    figure.update_layout(
        title=f"{config.run.preset} on {request.cluster.device.name}, batch"
        f" {config.run.global_batch} x {config.data.sequence_length} tokens at"
        f" {request.cluster.num_devices} devices",
        height=900,
    )
    return figure


def _draw_wall(
    figure: Any, draw: Callable[..., None], request: Request, points: Sequence[Point]
) -> None:
    """Draws a device's memory, what the leanest layout needs, and where nothing fits."""
    capacity = request.cluster.device.memory_bytes / 1e9
    known = [point for point in points if point.least_bytes < math.inf]
    need = [point.least_bytes / 1e9 for point in known]
    draw(2, [point.num_devices for point in known], need, name="leanest layout needs")
    counts = [point.num_devices for point in points]
    style = {"dash": "dash", "color": "black"}
    # A trace and not add_hline, whose label a logarithmic axis takes for an exponent.
    name = f"memory wall, {capacity:,.0f} GB"
    draw(2, counts, [capacity] * len(counts), name=name, mode="lines", line=style)
    walled = [point.num_devices for point in known if point.least_bytes / 1e9 > capacity]
    if walled:
        # To the middle between the last number that is too small and the next.
        band = {"opacity": 0.15, "line_width": 0, "fillcolor": "red"}
        figure.add_vrect(x0=min(counts) / math.sqrt(2), x1=max(walled) * math.sqrt(2), **band)
        for row in (1, 2):
            place = {"x": math.log10(min(counts)), "y": 1, "yref": "y domain", "yanchor": "top"}
            figure.add_annotation(
                text="does not fit", showarrow=False, xanchor="left", row=row, col=1, **place
            )
