"""All that a run left of its measurements, read once for rules and reports."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from tfbig.profiler import layout
from tfbig.profiler.step_table import AXES, describe_rank, ranks_with_steps, read_steps
from tfbig.profiler.system_table import SystemTable, read_lines, read_system
from tfbig.profiler.train_records import TrainRecords, read_train_records
from tfbig.run_folder import RunFolder, read_events


class StepMatrix(NamedTuple):
    """Steps of all ranks: (ranks, steps) float32, NaN where a rank lacks the step."""

    ranks: Sequence[int]
    steps: np.ndarray  # (steps,) ascending
    seconds: np.ndarray
    data_wait: np.ndarray
    communication: np.ndarray  # in flight, over all mesh axes
    bubble: np.ndarray
    resident_megabytes: np.ndarray

    @property
    def own_seconds(self) -> np.ndarray:
        """What a rank did itself: a step's time without that in which a collective was waited for.

        In a synchronous step all ranks end together: the slow one has waited least.
        """
        return self.seconds - self.communication


@dataclass(frozen=True)
class RunData:
    """A run's records and measurements.

    Args:
      folder: of the run.
      record: of config.json.
      train: training records.
      evaluations: records of evaluations.
      events: of events.jsonl.
      system: samples by host.
      matrix: steps by rank.
      captures: of captured steps, every rank's.
      tensors: statistics of tensors, every rank's.
      compilations: functions that were traced after the first step.
      hosts: descriptions of hosts.
      now: seconds since 1970 where the run may be in training still, None where it is over.
    """

    folder: RunFolder
    record: dict[str, Any]
    train: TrainRecords
    evaluations: list[dict[str, Any]]
    events: list[dict[str, Any]]
    system: list[SystemTable]
    matrix: StepMatrix
    captures: list[dict[str, Any]]
    tensors: list[dict[str, Any]]
    compilations: list[dict[str, Any]]
    hosts: list[dict[str, Any]]
    now: float | None = None

    @property
    def config(self) -> dict[str, dict[str, Any]]:
        """The configuration, by section."""
        return self.record["config"]

    @functools.cached_property
    def step_seconds(self) -> np.ndarray:
        """Seconds of the steps that hold, without the first, which holds the compilation."""
        return self.train.of("step_seconds")[1:]

    @functools.cached_property
    def data_wait_share(self) -> float:
        """Share of the steps' time that the slowest rank to be fed waited for data."""
        waits = [self.train.of("data_wait_seconds")[1:].sum()]
        if len(self.matrix.ranks):
            waits += list(np.nansum(self.matrix.data_wait[:, 1:], axis=1))
        total = self.step_seconds.sum()
        return float(min(1.0, max(waits) / total)) if total > 0 else 0.0

    def rank_names(self) -> list[str]:
        """Returns the ranks with their hosts."""
        described = (describe_rank(self.folder.profiler_dir, rank) for rank in self.matrix.ranks)
        return [f"rank {one['rank']} on {one.get('hostname', '?')}" for one in described]


def read_run(path: str | Path, now: float | None = None) -> RunData:
    """Reads a run, finished or in training.

    Args:
      path: of its folder.
      now: seconds since 1970, for a look at a run in training.

    Raises:
      UserError: it is no run's folder, or a file of it is damaged.
    """
    folder = RunFolder(path)
    record = folder.read_config()
    train, evaluations = read_train_records(folder.metrics_path)
    output = folder.profiler_dir
    return RunData(
        folder=folder,
        record=record,
        train=train,
        evaluations=evaluations,
        events=read_events(folder.path),
        system=read_system(output),
        matrix=read_matrix(output),
        captures=_all_lines(output, "captures"),
        tensors=_all_lines(output, "tensors"),
        compilations=_all_lines(output, "compilations"),
        hosts=[orjson.loads(file.read_bytes()) for file in sorted(output.glob("hosts/*.json"))],
        now=now,
    )


def _all_lines(output: Path, kind: str) -> list[dict[str, Any]]:
    lines = []
    for rank_file in sorted((output / kind).glob("rank-*.jsonl")):
        lines += read_lines(rank_file)
    return lines


def read_matrix(output: Path) -> StepMatrix:
    """Returns the steps of all ranks, read one rank at a time."""
    ranks = ranks_with_steps(output)
    last = 0
    for rank in ranks:
        rows = read_steps(output, rank)
        last = max(last, int(rows["step"].max()) if len(rows) else 0)
    names = ("seconds", "data_wait", "communication", "bubble", "resident_megabytes")
    parts = {name: np.full([len(ranks), last], np.nan, np.float32) for name in names}
    for index, rank in enumerate(ranks):
        rows = read_steps(output, rank)
        places = rows["step"].astype(np.int64) - 1
        for name in names:
            if name == "communication":
                values = np.nansum([rows[axis] for axis in AXES], axis=0)
            else:
                values = rows[name]
            parts[name][index, places] = values
    return StepMatrix(ranks, np.arange(1, last + 1), **parts)


def capture_path(data: RunData, capture: dict[str, Any]) -> Path:
    """Returns the XPlane file of a captured step."""
    return data.folder.profiler_dir / capture["capture"]


def rank_file(output: Path, kind: str, rank: int) -> Path:
    """Returns a rank's JSON lines file of a kind."""
    return layout.rank_path(output, kind, rank, ".jsonl")
