"""Compares what two runs of parity_worker.py saw."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.distributed.launch import horovodrun, run

WORKER = "tests/distributed/parity_worker.py"
TRUE_VOCABULARY = 57  # of the worker's 61 ids
Saw = dict[str, np.ndarray]


def run_cases(
    folder: Path, num_processes: int, cases: Sequence[dict], timeout: float
) -> dict[str, Saw]:
    """Returns what rank 0 saw of each case, all run by one launch.

    Args:
      folder: for the results.
      num_processes: 1 runs without horovodrun.
      cases: of parity_worker.py.
      timeout: seconds for the launch.
    """
    arguments = [WORKER, str(folder), json.dumps(cases)]
    if num_processes == 1:
        done = run([sys.executable, *arguments], timeout)
    else:
        done = horovodrun(num_processes, arguments, timeout)
    assert done.returncode == 0, done.stdout
    return {case["name"]: dict(np.load(folder / f"{case['name']}.npz")) for case in cases}


def largest_error(a: Saw, b: Saw, prefix: str) -> tuple[float, str]:
    """The largest relative error of a tensor: ||a-b|| / max(||b||, 1e-3 x the largest norm)."""
    norms = {path: np.linalg.norm(value) for path, value in b.items() if path.startswith(prefix)}
    floor = 1e-3 * max(norms.values())
    return max(
        (float(np.linalg.norm(a[path] - b[path]) / max(norm, floor)), path)
        for path, norm in norms.items()
    )


def loss_error(a: Saw, b: Saw) -> float:
    """The largest relative error of a step's loss."""
    return float(np.max(np.abs(a["losses"] / b["losses"] - 1)))


def overall_error(a: Saw, b: Saw, prefix: str) -> float:
    """The relative error of all tensors together."""
    paths = [path for path in b if path.startswith(prefix)]
    squares = [(np.sum((a[p] - b[p]) ** 2.0), np.sum(b[p] ** 2.0)) for p in paths]
    return float(np.sqrt(sum(x for x, _ in squares) / sum(y for _, y in squares)))
