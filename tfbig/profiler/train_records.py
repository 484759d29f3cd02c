"""A run's training records as columns: 100,000 steps fit into little memory."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from tfbig.errors import UserError

SCALARS = (
    "step time consumed_samples loss num_tokens learning_rate grad_norm loss_scale applied"
    " tokens_per_second step_seconds data_wait_seconds mfu peak_flops peak_memory_bytes"
).split()


class TrainRecords(NamedTuple):
    """Records of kind train, in the order in which they were written.

    After a resume from an older checkpoint some steps appear twice; `kept` marks those that hold.
    """

    columns: dict[str, np.ndarray]  # (n,) float64 each, NaN where a record says null
    source_loss: np.ndarray  # (n, sources)
    source_num_tokens: np.ndarray  # (n, sources)
    communication: dict[str, np.ndarray]  # seconds (n,) by mesh axis
    layer_norms: np.ndarray  # (n, layers); (n, 0) where none were recorded
    kept: np.ndarray  # (n,) bool

    def of(self, name: str) -> np.ndarray:
        """Returns a column of the steps that hold, by step."""
        steps = self.columns["step"][self.kept]
        return self.columns[name][self.kept][np.argsort(steps, kind="stable")]

    @property
    def num_steps(self) -> int:
        """Steps that hold."""
        return int(self.kept.sum())


def read_train_records(path: Path) -> tuple[TrainRecords, list[dict[str, Any]]]:
    """Returns the training records, and those of evaluations as they are.

    Args:
      path: metrics.jsonl; a last line that is being written is left out.

    Raises:
      UserError: another line is damaged.
    """
    rows: list[list[float]] = []
    sources: list[list[float]] = []
    source_tokens: list[list[float]] = []
    communication: list[dict[str, float]] = []
    layers: list[list[float]] = []
    evaluations = []
    for record in _records(path):
        if record["kind"] == "eval":
            evaluations.append(record)
            continue
        nonfinite = record.get("nonfinite", {})
        rows.append([_number(record.get(name), nonfinite.get(name)) for name in SCALARS])
        sources.append([_number(value) for value in record.get("source_loss", [])])
        source_tokens.append(record.get("source_num_tokens", []))
        communication.append(record.get("communication_seconds", {}))
        norms = record.get("layer_grad_norms")
        layers.append(
            [norms["embedding"], *norms["transformer_blocks"], norms["head"]] if norms else []
        )
    table = np.array(rows, np.float64).reshape(len(rows), len(SCALARS))
    columns = dict(zip(SCALARS, table.T, strict=True))
    axes = dict.fromkeys(axis for spent in communication for axis in spent)
    by_axis = {axis: np.array([spent.get(axis, 0.0) for spent in communication]) for axis in axes}
    last = {step: index for index, step in enumerate(columns["step"])}
    kept = np.zeros(len(rows), bool)
    kept[list(last.values())] = True
    records = TrainRecords(
        columns, _padded(sources), _padded(source_tokens), by_axis, _padded(layers), kept
    )
    return records, evaluations


def _records(path: Path) -> Any:
    if not path.exists():
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield orjson.loads(line)
            except orjson.JSONDecodeError as error:
                if not line.endswith(b"\n"):
                    return  # still being written
                raise UserError(
                    f"{path}, line {number}, is not JSON ({error}); mend or remove that line"
                ) from error


def _number(value: Any, nonfinite: str | None = None) -> float:
    if nonfinite is not None:
        return float(nonfinite)
    return float("nan") if value is None else float(value)


def _padded(rows: list[list[float]]) -> np.ndarray:
    width = max(map(len, rows), default=0)
    if width and min(map(len, rows)) == width:
        return np.array(rows, np.float32)  # None becomes NaN
    table = np.full([len(rows), width], np.nan, np.float32)
    for index, row in enumerate(rows if width else []):
        table[index, : len(row)] = [np.nan if value is None else value for value in row]
    return table
