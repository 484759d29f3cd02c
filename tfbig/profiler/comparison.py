"""Several runs beside each other: what differs in configuration and numbers, and beyond noise."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from tfbig.profiler.chart import thin
from tfbig.profiler.document import Document, Section, Table
from tfbig.profiler.figures import smooth
from tfbig.profiler.goodput import ledger_of
from tfbig.profiler.run_data import RunData
from tfbig.profiler.similar_runs import similarity
from tfbig.profiler.summary import split_shares, summarise

_BLOCKS = 20
_ERRORS = 3.0  # standard errors beyond which a difference is no noise
_POINTS = 1200
_COMPARED = {
    "step_seconds": ("seconds of a step", "lower"),
    "tokens_per_second": ("tokens/s", "higher"),
    "mfu": ("MFU", "higher"),
    "loss": ("loss, last tenth of the steps", "lower"),
    "data_wait_seconds": ("wait for data, s", "lower"),
    "grad_norm": ("gradient norm", ""),
}


def blocks_of(values: np.ndarray) -> np.ndarray:
    """Returns medians of 20 stretches of steps: neighbouring steps are alike, stretches less so."""
    known = values[np.isfinite(values)]
    return np.array([np.median(part) for part in np.array_split(known, _BLOCKS) if len(part)])


def difference(first: np.ndarray, second: np.ndarray) -> tuple[float, float]:
    """Returns (difference of means, its standard error) of two sets of blocks.

    Welch's statistic is their ratio (doi.org/10.1093/biomet/34.1-2.28).
    """
    if len(first) < 2 or len(second) < 2:
        return float("nan"), float("nan")
    error = np.sqrt(first.var(ddof=1) / len(first) + second.var(ddof=1) / len(second))
    return float(second.mean() - first.mean()), float(error)


def compare(runs: Sequence[RunData]) -> Document:
    """Returns the comparison of runs with the first one."""
    names = _names(runs)
    first = runs[0]
    numbers = [summarise(run, ledger_of(run), None) for run in runs]
    changes = _config_rows(runs)
    verdict: list[str] = []
    rows: list[list[Any]] = []
    for name, run in zip(names[1:], runs[1:], strict=True):
        found, lines = _compared(first, run, name)
        rows += found
        similar = similarity(first, run)  # of tensors, where both runs looked at them
        verdict += [*lines, *([f"{name}: {similar}"] if similar else [])]
    beyond = [row for row in rows if row[-1]]
    changed = f"{len(changes)} options differ" if changes else "No option differs"
    heading = f"{changed}; {len(beyond)} of {len(rows)} compared numbers differ beyond noise."
    columns = ["run", "number", names[0], "this run", "change, %", "noise, %", "beyond noise"]
    sections = [
        Section(
            "Configuration",
            [] if changes else ["No option differs."],
            [Table(["option", *names], changes)] if changes else [],
        ),
        Section(
            "Numbers",
            [
                "Each run's steps (without the first) are cut into 20 stretches; a difference"
                " counts where it exceeds 3 standard errors of their medians' means. One run a side"
                " says nothing of other seeds: repeat runs with another --seed for that.",
            ],
            [Table(columns, rows), _all_numbers(names, numbers)],
        ),
        Section("Learning", figures=[("Loss, moving means.", _losses(names, runs))]),
        Section("A step's time", [], [_splits(names, runs)]),
    ]
    title = "Runs compared: " + ", ".join(names)
    return Document(
        title,
        [heading, *verdict],
        sections,
        {
            "runs": [str(run.folder.path) for run in runs],
            "options": [dict(zip(["option", *names], row, strict=True)) for row in changes],
            "numbers": dict(zip(names, numbers, strict=True)),
            "comparisons": [dict(zip(columns, row, strict=True)) for row in rows],
        },
    )


def _names(runs: Sequence[RunData]) -> list[str]:
    names = [run.folder.path.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder.path) for run in runs]


def _config_rows(runs: Sequence[RunData]) -> list[list[Any]]:
    flat = [
        {
            f"{section}.{name}": value
            for section, fields in run.config.items()
            for name, value in fields.items()
        }
        for run in runs
    ]
    keys = dict.fromkeys(key for one in flat for key in one)
    rows = []
    for key in keys:
        values = [str(one.get(key, "(not there)")) for one in flat]
        if len(set(values)) > 1 and key != "run.run_dir":
            rows.append([key, *values])
    versions = [run.record["versions"] for run in runs]
    for package in dict.fromkeys(name for one in versions for name in one):
        values = [one.get(package, "(not there)") for one in versions]
        if len(set(values)) > 1:
            rows.append([f"version of {package}", *values])
    return rows


def _values(run: RunData, name: str) -> np.ndarray:
    column = run.train.of(name)[1:]
    return column[-max(2 * _BLOCKS, len(column) // 10) :] if name == "loss" else column


def _compared(first: RunData, run: RunData, name: str) -> tuple[list[list[Any]], list[str]]:
    rows: list[list[Any]] = []
    lines = []
    for column, (label, better) in _COMPARED.items():
        before, after = blocks_of(_values(first, column)), blocks_of(_values(run, column))
        change, error = difference(before, after)
        if not np.isfinite(change):
            continue
        base = float(before.mean())
        percent = 100 * change / abs(base) if base else float("nan")
        noise = 100 * _ERRORS * error / abs(base) if base else float("nan")
        beyond = abs(change) > _ERRORS * error and abs(change) > 1e-9 * abs(base)
        rows.append([name, label, base, float(after.mean()), percent, noise, beyond])
        if beyond:
            good = (change < 0) == (better == "lower")
            word = ("better, " if good else "worse, ") if better else ""
            lines.append(f"{name}: {label} {percent:+.1f}%, {word}beyond noise ({noise:.1f}%).")
    same = min(first.train.num_steps, run.train.num_steps)
    if same and np.array_equal(first.train.of("loss")[:same], run.train.of("loss")[:same]):
        lines.append(f"{name}: the losses of the first {same} steps are equal, bit by bit.")
    elif not any("seconds of a step" in line for line in lines):
        lines.append(f"{name}: the steps' time differs by no more than noise.")
    return rows, lines


def _all_numbers(names: Sequence[str], numbers: Sequence[dict[str, Any]]) -> Table:
    rows = [
        [key, *(one[key] for one in numbers)]
        for key, value in numbers[0].items()
        if not isinstance(value, dict)
    ]
    return Table(["number", *names], rows, "All numbers.")


def _losses(names: Sequence[str], runs: Sequence[RunData]) -> go.Figure:
    figure = go.Figure()
    for name, run in zip(names, runs, strict=True):
        loss = run.train.of("loss")
        steps, values = thin(run.train.of("step"), smooth(loss, max(1, len(loss) // 50)), _POINTS)
        figure.add_trace(go.Scatter(x=steps, y=values, name=name, mode="lines"))
        if run.evaluations:
            points = [(record["step"], record["loss"]) for record in run.evaluations]
            steps, values = zip(*points, strict=True)
            figure.add_trace(
                go.Scatter(x=steps, y=values, name=f"{name}, validation", mode="markers")
            )
    return figure.update_layout(height=450, xaxis_title="step", yaxis_title="loss")


def _splits(names: Sequence[str], runs: Sequence[RunData]) -> Table:
    shares = [split_shares(run) for run in runs]
    parts = dict.fromkeys(part for one in shares for part in one)
    rows = [[part, *(100 * one.get(part, 0.0) for one in shares)] for part in parts]
    return Table(["part, % of captured steps", *names], rows)
