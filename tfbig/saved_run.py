"""A run folder as its readers see it: evaluate, generate and what serves or exports it."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tfbig.adapters import MergedReader, merged_model
from tfbig.checkpoint import list_checkpoints
from tfbig.checkpoint_reader import CheckpointReader
from tfbig.config import Config, ModelConfig, from_dict
from tfbig.errors import UserError
from tfbig.parallel_config import ParallelConfig
from tfbig.run_folder import RunFolder

AVERAGE = "ema/"


class AverageReader:
    """Shows a checkpoint's moving averages as its weights.

    Args:
      reader: of the checkpoint.
    """

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader

    def has(self, path: str) -> bool:
        """Returns whether there is an average of `path`, or a weight that is its own."""
        return self._reader.has(self._name(path))

    def read(
        self, path: str, start: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None
    ) -> np.ndarray:
        """Returns the average of `path`, or a slice of it."""
        return self._reader.read(self._name(path), start, shape)

    def shape(self, path: str) -> tuple[int, ...]:
        """Returns the whole shape of `path`."""
        return self._reader.shape(path)

    def _name(self, path: str) -> str:
        """Returns what is read for `path`: variables that are not trained have no average."""
        return AVERAGE + path if self._reader.has(AVERAGE + path) else path


@dataclass(frozen=True)
class SavedRun:
    """One checkpoint of a run.

    Attributes:
      folder: the run's.
      config: what it was trained with.
      reader: of the checkpoint.
    """

    folder: RunFolder
    config: Config
    reader: CheckpointReader

    @classmethod
    def open(cls, run: str, step: int = -1) -> "SavedRun":
        """Returns a checkpoint of a run folder.

        Args:
          run: the run folder.
          step: of the checkpoint; -1 means the newest.

        Raises:
          UserError: no such run, or no such checkpoint in it.
        """
        if not run:
            raise UserError("--run is missing: name a run folder, e.g. --run=runs/gpt_tiny.")
        if not Path(run).is_dir():
            raise UserError(
                f"--run={run} is not a folder: name a run folder, e.g. --run=runs/gpt_tiny."
            )
        folder = RunFolder(run)
        config = from_dict(folder.read_config()["config"])
        found = {info.step: info for info in list_checkpoints(folder.checkpoints_dir)}
        if not found:
            raise UserError(
                f"{run} has no complete checkpoint yet: train it further, or name another run."
            )
        step = max(found) if step == -1 else step
        if step not in found:
            steps = ", ".join(str(number) for number in sorted(found))
            raise UserError(f"{run} has no checkpoint of step {step}: take one of {steps}.")
        return cls(folder, config, CheckpointReader(found[step].path, checks_digests=True))

    @property
    def step(self) -> int:
        """Of the checkpoint."""
        return self.reader.step

    def weights(self, kind: str) -> Any:
        """Returns what `load_state` reads the weights from.

        Args:
          kind: "model", or "ema" for their moving average.

        Raises:
          UserError: the run keeps no moving average.
        """
        if kind == "model":
            return self.reader
        if not any(path.startswith(AVERAGE) for path in self.reader.paths()):
            raise UserError(
                f"--weights=ema: {self.folder.path} keeps no moving average of its weights, as "
                "runs with --ema_decay do; leave it out."
            )
        return AverageReader(self.reader)

    def merged_weights(self, kind: str) -> Any:
        """Returns what the weights of `merged_model` are read from.

        Args:
          kind: as for `weights`.
        """
        weights = self.weights(kind)
        if not self.config.model.lora_rank:
            return weights
        return MergedReader(weights, self.config.model.lora_alpha)

    @property
    def merged_model(self) -> ModelConfig:
        """The model with its adapters, if it has any, merged into its kernels."""
        return merged_model(self.config.model)

    def with_parallel(self, values: dict[str, Any]) -> Config:
        """Returns the run's configuration on another layout.

        Args:
          values: fields of ParallelConfig; the others take their defaults, except for the
            precision, which is the run's.
        """
        precision = self.config.parallel.precision
        parallel = ParallelConfig(**({"precision": precision} | values))
        return dataclasses.replace(self.config, parallel=parallel)
