"""The figures of a report; each holds few points, however long the run was."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from tfbig.profiler.chart import Series, merge_hosts, series_of, thin, to_datetimes
from tfbig.profiler.heatmap import heatmap_of
from tfbig.profiler.run_data import RunData, StepMatrix
from tfbig.profiler.system_table import SystemTable

_POINTS = 1200  # of a line
_CELLS = 400  # columns of a heatmap
_MOST_RANKS = _MOST_BOXES = 64  # of a box plot
_USE = ("CPUUtilization", "GPUUtilization")


def _line(figure: go.Figure, x: Any, y: np.ndarray, name: str, **where: Any) -> None:
    x, y = thin(np.asarray(x, float), np.asarray(y, float), _POINTS)
    figure.add_trace(go.Scatter(x=x, y=np.round(y, 6), name=name, mode="lines"), **where)


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Returns moving means over `width` values, over fewer at the ends."""
    if width <= 1 or len(values) < 3:
        return values
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    index = np.arange(len(values))
    start = np.maximum(index - width // 2, 0)
    stop = np.minimum(start + width, len(values))
    seen = counts[stop] - counts[start]
    return np.where(seen > 0, (sums[stop] - sums[start]) / np.maximum(seen, 1), np.nan)


def curves(run: RunData) -> go.Figure:
    """Returns loss, learning rate and gradient norm by step."""
    figure = make_subplots(
        rows=3,
        cols=1,
        shared_xaxes=True,
        subplot_titles=["loss", "learning rate", "gradient norm before clipping"],
        row_heights=[0.5, 0.2, 0.3],
        vertical_spacing=0.08,
    )
    steps, loss = run.train.of("step"), run.train.of("loss")
    _line(figure, steps, loss, "training loss", row=1, col=1)
    _line(figure, steps, smooth(loss, max(1, len(loss) // 50)), "its moving mean", row=1, col=1)
    if run.evaluations:
        figure.add_trace(
            go.Scatter(
                x=[record["step"] for record in run.evaluations],
                y=[record["loss"] for record in run.evaluations],
                name="validation loss",
                mode="markers+lines",
            ),
            row=1,
            col=1,
        )
    _line(figure, steps, run.train.of("learning_rate"), "learning rate", row=2, col=1)
    _line(figure, steps, run.train.of("grad_norm"), "gradient norm", row=3, col=1)
    return figure.update_layout(height=700).update_xaxes(title="step", row=3, col=1)


def rates(run: RunData) -> go.Figure:
    """Returns tokens/s and MFU by step."""
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, subplot_titles=["tokens/s", "MFU, %"])
    steps = run.train.of("step")[1:]
    _line(figure, steps, run.train.of("tokens_per_second")[1:], "tokens/s", row=1, col=1)
    _line(figure, steps, 100 * run.train.of("mfu")[1:], "MFU", row=2, col=1)
    return figure.update_layout(height=420, showlegend=False).update_xaxes(
        title="step", row=2, col=1
    )


def bar_of_shares(shares: Mapping[str, float]) -> go.Figure:
    """Returns parts of a whole as one bar."""
    figure = go.Figure()
    for part, share in shares.items():
        figure.add_bar(
            x=[100 * share],
            y=[""],
            name=part,
            orientation="h",
            text=f"{part} {100 * share:.1f}%" if share > 0.05 else None,
        )
    return figure.update_layout(barmode="stack", height=200, xaxis_title="%", xaxis_range=[0, 100])


def step_times(run: RunData) -> go.Figure:
    """Returns each step's time and its wait for data."""
    figure = go.Figure()
    steps = run.train.of("step")[1:]
    _line(figure, steps, 1000 * run.train.of("step_seconds")[1:], "step")
    _line(figure, steps, 1000 * run.train.of("data_wait_seconds")[1:], "wait for data")
    return figure.update_layout(height=320, yaxis_title="ms", xaxis_title="step")


def step_histogram(run: RunData) -> go.Figure:
    """Returns how long steps took, up to the 99th percentile."""
    milliseconds = 1000 * run.step_seconds
    limit = float(np.percentile(milliseconds, 99)) if len(milliseconds) else 1.0
    counts, edges = np.histogram(milliseconds[milliseconds <= limit], bins=50)
    figure = go.Figure(go.Bar(x=np.round((edges[1:] + edges[:-1]) / 2, 4), y=counts))
    return figure.update_layout(height=300, xaxis_title="ms of a step", yaxis_title="steps")


def rank_boxes(run: RunData, names: Sequence[str]) -> go.Figure:
    """Returns a box a rank of its own work in a step, by five quantiles."""
    figure = go.Figure()
    own = 1000 * run.matrix.own_seconds[:, 1:]
    for index in range(min(len(names), _MOST_RANKS)):
        known = own[index][~np.isnan(own[index])]
        if not len(known):
            continue
        low, first, median, third, high = np.percentile(known, [2, 25, 50, 75, 98])
        figure.add_trace(
            go.Box(
                name=names[index],
                lowerfence=[low],
                q1=[first],
                median=[median],
                q3=[third],
                upperfence=[high],
            )
        )
    return figure.update_layout(
        height=400, showlegend=False, yaxis_title="ms of own work (whiskers: 2nd and 98th %)"
    )


def rank_heatmap(matrix: StepMatrix, names: Sequence[str]) -> go.Figure:
    """Returns ranks' own work over the steps, relative to the median rank's."""
    own = matrix.own_seconds[:, 1:]
    bins = np.array_split(np.arange(own.shape[1]), max(1, min(_CELLS, own.shape[1])))
    cells = np.stack([np.nanmean(own[:, chosen], axis=1) for chosen in bins], axis=1)
    relative = 100 * (cells / np.maximum(np.nanmedian(cells, axis=0), 1e-9) - 1)
    steps = [int(matrix.steps[1:][chosen[0]]) for chosen in bins]
    figure = go.Figure(
        go.Heatmap(
            z=np.round(relative, 1),
            x=steps,
            y=list(names),
            colorscale="RdBu_r",
            zmid=0,
            zmin=-50,
            zmax=50,
            colorbar_title="%",
        )
    )
    return figure.update_layout(height=max(300, 60 + 14 * len(names)), xaxis_title="step")


def host_timelines(tables: Sequence[SystemTable]) -> go.Figure:
    """Returns what the hosts did, one panel a subject."""
    found = merge_if_many(series_of(tables))
    panels = {
        "CPU use, mean over cores, %": ("CPUUtilization", "total"),
        "I/O wait, mean over cores, %": ("I/OWaitPercentage", "total"),
        "pressure of I/O, %": ("PressurePercent", "io_some"),
        "memory, %": ("MemoryUsedPercent", "total"),
        "GPU use, mean, %": ("GPUUtilization", "total"),
        "GPU memory, mean, %": ("GPUMemoryUtilization", "total"),
        "GPU power, mean, W": ("PowerWatts", "total"),
        "disk reads, MB/s": ("ReadThroughputInBytesPerSecond", "total"),
        "disk writes, MB/s": ("WriteThroughputInBytesPerSecond", "total"),
        "network received, MB/s": ("Algorithm", "ReceiveBytesPerSecond"),
        "network sent, MB/s": ("Algorithm", "TransmitBytesPerSecond"),
    }
    chosen = {
        title: lines
        for title, key in panels.items()
        if (lines := [s for s in found if (s.dimension, s.event) == key])
    }
    figure = make_subplots(
        rows=max(1, len(chosen)),
        cols=1,
        shared_xaxes=True,
        subplot_titles=list(chosen),
        vertical_spacing=0.25 / max(1, len(chosen)),
    )
    for row, (title, lines) in enumerate(chosen.items(), 1):
        scale = 1e-6 if "MB/s" in title else 1.0
        for one in lines:
            times, values = thin(one.times, scale * one.values, _POINTS)
            line = go.Scatter(
                x=to_datetimes(times), y=np.round(values, 2), name=one.node_id, mode="lines"
            )
            figure.add_trace(line, row=row, col=1)
    return figure.update_layout(height=150 * max(2, len(chosen)), showlegend=False)


def merge_if_many(found: list[Series], most: int = 16) -> list[Series]:
    """Returns one series for all hosts where there are too many for a line each."""
    return merge_hosts(found) if len({one.node_id for one in found}) > most else found


def core_heatmap(tables: Sequence[SystemTable]) -> go.Figure:
    """Returns the use of each core and GPU, in at most 400 means over time."""
    found = []
    for table in tables:
        count = len(table.times)
        bins = np.array_split(np.arange(count), max(1, min(_CELLS, count)))
        times = np.array([table.times[chosen].mean() for chosen in bins])
        means = np.stack([table.values[chosen].mean(axis=0) for chosen in bins])  # (bins, columns)
        for (_, dimension, name), values in zip(table.columns, means.T, strict=True):
            if dimension in _USE:
                found.append(Series(dimension, name, table.node_id, times, np.round(values, 1)))
    return heatmap_of(found)


def use_boxes(tables: Sequence[SystemTable]) -> go.Figure:
    """Returns a box a core and GPU, of many a box a host, of its use by five quantiles."""
    boxes: dict[str, np.ndarray] = {}
    for table in tables:
        for (_, dimension, name), values in zip(table.columns, table.values.T, strict=True):
            if dimension in _USE:
                boxes[f"{table.node_id} {name}"] = values
    if len(boxes) > _MOST_BOXES:
        boxes = {
            f"{table.node_id}, all {kind}": table.of(kind, dimension).ravel()
            for table in tables
            for kind, dimension in (("cpu", _USE[0]), ("gpu", _USE[1]))
        }
    figure = go.Figure()
    for name, values in boxes.items():
        known = values[~np.isnan(values)]
        if len(known):
            low, first, median, third, high = np.percentile(known, [5, 25, 50, 75, 95])
            box = {"lowerfence": [low], "q1": [first], "median": [median]}
            box |= {"q3": [third], "upperfence": [high]}
            figure.add_trace(go.Box(name=name, **box))
    return figure.update_layout(
        height=400, showlegend=False, yaxis_title="% (whiskers: 5th and 95th)"
    )


def memory(run: RunData, names: Sequence[str]) -> go.Figure:
    """Returns the ranks' resident memory by step."""
    figure = go.Figure()
    for index, values in enumerate(run.matrix.resident_megabytes[:_MOST_RANKS]):
        known = ~np.isnan(values)
        _line(figure, run.matrix.steps[known], values[known], names[index])
    return figure.update_layout(height=350, yaxis_title="MB resident", xaxis_title="step")


def source_losses(run: RunData, sources: Sequence[str]) -> go.Figure:
    """Returns the loss of each source's tokens by step, as a moving mean."""
    figure = go.Figure()
    order = np.argsort(run.train.columns["step"][run.train.kept], kind="stable")
    loss = run.train.source_loss[run.train.kept][order]
    tokens = run.train.source_num_tokens[run.train.kept][order]
    steps = run.train.of("step")
    for index, source in enumerate(sources[: loss.shape[1]]):
        seen = tokens[:, index] > 0
        values = smooth(loss[seen, index], max(1, int(seen.sum()) // 50))
        _line(figure, steps[seen], values, source)
    return figure.update_layout(height=400, yaxis_title="loss", xaxis_title="step")
