"""Statistics of tensors, and their records. TensorFlow-free."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def statistics_of(values: np.ndarray) -> dict[str, float]:
    """Returns what the tensor rules look at; of the finite values, and how many are not."""
    flat = np.asarray(values, np.float32).ravel()
    finite = flat[np.isfinite(flat)]
    count = max(1, finite.size)
    return {
        "size": flat.size,
        "nonfinite": int(flat.size - finite.size),
        "mean": float(finite.mean(dtype=np.float64)) if finite.size else 0.0,
        "mean_abs": float(np.abs(finite).mean(dtype=np.float64)) if finite.size else 0.0,
        "std": float(finite.std(dtype=np.float64)) if finite.size else 0.0,
        "min": float(finite.min()) if finite.size else 0.0,
        "max": float(finite.max()) if finite.size else 0.0,
        "p5_abs": float(np.percentile(np.abs(finite), 5)) if finite.size else 0.0,
        "p95_abs": float(np.percentile(np.abs(finite), 95)) if finite.size else 0.0,
        "zero_fraction": float((finite == 0).sum() / count),
    }


def change_of(before: np.ndarray, after: np.ndarray) -> dict[str, float]:
    """Returns how much a tensor changed: norm of the difference over its norm, share unchanged."""
    difference = (after - before).ravel()
    norm = float(np.linalg.norm(before))
    return {
        "update_ratio": float(np.linalg.norm(difference)) / (norm + 1e-9),
        "unchanged": bool(np.allclose(before, after, rtol=1e-5, atol=1e-8)),
    }


def by_tensor(
    records: Sequence[Mapping[str, Any]], kind: str
) -> dict[str, list[Mapping[str, Any]]]:
    """Returns the records of a kind by tensor, in the order of their steps; the last holds."""
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    for record in records:
        if record["kind"] == kind:
            found.setdefault(record["name"], {})[record["step"]] = record
    return {name: [steps[step] for step in sorted(steps)] for name, steps in found.items()}
