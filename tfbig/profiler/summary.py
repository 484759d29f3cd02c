"""The numbers of a run that stand for it, and the verdict on it."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tfbig.profiler.energy import Energy
from tfbig.profiler.goodput import Ledger
from tfbig.profiler.rules.rule import Finding
from tfbig.profiler.run_data import RunData

_TAIL = 0.1  # of the steps, whose mean is a run's last loss


def _median(values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else None


def last_loss(run: RunData) -> float | None:
    """Returns the mean loss of the last tenth of the steps."""
    loss = run.train.of("loss")
    tail = loss[-max(1, int(_TAIL * len(loss))) :]
    return float(tail.mean()) if len(loss) else None


def summarise(run: RunData, ledger: Ledger, energy: Energy | None) -> dict[str, Any]:
    """Returns a run's numbers by name."""
    train = run.train
    steady = slice(1, None)
    tokens = float(np.nansum(train.of("num_tokens")))
    evaluation = run.evaluations[-1] if run.evaluations else {}
    split = split_shares(run)
    return {
        "steps": train.num_steps,
        "step_seconds": _median(train.of("step_seconds")[steady]),
        "tokens_per_second": _median(train.of("tokens_per_second")[steady]),
        "mfu": _median(train.of("mfu")[steady]),
        "peak_flops": _median(train.of("peak_flops")),
        "tokens": tokens,
        "loss": last_loss(run),
        "validation_loss": evaluation.get("loss"),
        "bits_per_byte": evaluation.get("bits_per_byte"),
        "data_wait_share": run.data_wait_share,
        "peak_memory_bytes": float(np.nanmax(train.of("peak_memory_bytes")))
        if train.num_steps
        else None,
        "ranks": max(1, len(run.matrix.ranks)),
        "hosts": max(1, len(run.system)),
        "goodput": ledger.goodput,
        "wall_seconds": ledger.total,
        "ledger_seconds": ledger.seconds,
        "lost_steps": ledger.num_lost_steps,
        "starts": ledger.num_sessions,
        "split_shares": split,
        "joules": energy.joules if energy else None,
        "joules_per_token": energy.joules / tokens if energy and tokens else None,
        "kilograms_co2": energy.kilograms if energy else None,
    }


def split_shares(run: RunData) -> dict[str, float]:
    """Returns the parts of the captured steps' wall time, summed over ranks; they sum to 1."""
    wall = sum(capture["wall_seconds"] for capture in run.captures)
    shares: dict[str, float] = {}
    for capture in run.captures:
        for part, seconds in capture["split"].items():
            shares[part] = shares.get(part, 0.0) + seconds / wall
    return shares


def hidden_share(run: RunData) -> float:
    """Returns communication under computation over the captured steps' wall time."""
    wall = sum(capture["wall_seconds"] for capture in run.captures)
    hidden = sum(capture["hidden_communication"] for capture in run.captures)
    return hidden / wall if wall else 0.0


def verdict_of(
    run: RunData, numbers: dict[str, Any], ledger: Ledger, findings: Sequence[Finding]
) -> list[str]:
    """Returns the verdict: what the run was, then what fired, by what it costs."""
    lines = [_account(run, numbers, ledger)]
    fired = [finding for finding in findings if finding.triggered]
    for finding in fired:
        gain = f" It could save {finding.expected}." if finding.expected else ""
        change = f" Change: {finding.change}." if finding.change else ""
        lines.append(f"{finding.rule}: {finding.evidence}.{change}{gain}")
    if not fired:
        largest = max(ledger.seconds, key=lambda part: ledger.seconds[part])
        share = ledger.seconds[largest] / ledger.total if ledger.total else 0.0
        lines.append(
            f"No rule fired. The largest part of the time is {largest} ({100 * share:.0f}%)."
        )
    return lines


def _account(run: RunData, numbers: dict[str, Any], ledger: Ledger) -> str:
    parallel = run.config["parallel"]
    said = [
        f"{numbers['steps']:,} steps of {run.config['run']['preset']} by {parallel['strategy']} on"
        f" {numbers['ranks']} rank{'s' if numbers['ranks'] > 1 else ''}"
    ]
    if numbers["tokens_per_second"]:
        rate = f"{numbers['tokens_per_second']:,.0f} tokens/s"
        if numbers["mfu"] is not None:
            peak = numbers["peak_flops"] / 1e9
            rate += f" (MFU {100 * numbers['mfu']:.1f}% of {peak:,.0f} GFLOP/s)"
        said.append(rate)
    if numbers["loss"] is not None:
        said.append(f"loss {numbers['loss']:.4f}")
    if numbers["validation_loss"] is not None:
        said.append(f"validation loss {numbers['validation_loss']:.4f}")
    if ledger.total:
        said.append(
            f"{100 * ledger.goodput:.0f}% of {ledger.total:,.0f} s went into steps that hold"
        )
    return "; ".join(said) + "."
