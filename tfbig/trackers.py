"""Experiment trackers: records of a run go to MLflow or to Weights & Biases (offline) as well."""

import re
from collections.abc import Iterator
from typing import Any

from tfbig.config import Config, to_dict
from tfbig.loop import Hook, Progress
from tfbig.metrics import source_scalars

_NO_SCALARS = ("kind", "step", "time")


def scalars_of(record: dict[str, Any], prefix: str) -> dict[str, float]:
    """Returns a record's numbers by name.

    >>> scalars_of({"kind": "eval", "step": 3, "loss": 2.5, "applied": True}, "validation")
    {'validation/loss': 2.5, 'validation/applied': 1.0}
    """
    return {
        f"{prefix}/{name}": float(value)
        for name, value in record.items()
        if name not in _NO_SCALARS and isinstance(value, (int, float))
    }


def _options(config: Config) -> Iterator[tuple[str, Any]]:
    for section, fields in to_dict(config).items():
        for name, value in fields.items():
            yield f"{section}.{name}", value


class MlflowHook(Hook):
    """Logs to MLflow: where MLFLOW_TRACKING_URI says, else into ./mlruns.

    Args:
      config: of the run.
    """

    def __init__(self, config: Config) -> None:
        import mlflow

        self._mlflow, self._config = mlflow, config

    def on_start(self, progress: Progress, resumed: bool) -> None:
        self._mlflow.start_run(run_name=self._config.run.run_dir)
        for name, value in _options(self._config):
            self._mlflow.log_param(name, str(value)[:500])

    def on_step(self, record: dict[str, Any]) -> None:
        # MLflow refuses names with other characters, as "Wikipedia (en)" has.
        of_sources = {
            re.sub(r"[^\w\-. /]", "_", name): value
            for name, value in source_scalars(record).items()
        }
        scalars = scalars_of(record, "train") | of_sources
        self._mlflow.log_metrics(scalars, step=record["step"])

    def on_evaluation(self, record: dict[str, Any]) -> None:
        self._mlflow.log_metrics(scalars_of(record, "validation"), step=record["step"])

    def on_stop(self, progress: Progress, reason: str) -> None:
        self._mlflow.end_run("FINISHED" if reason == "done" else "KILLED")


class WandbHook(Hook):
    """Logs to Weights & Biases' files in the run's folder; `wandb sync` uploads them.

    Args:
      config: of the run.
    """

    def __init__(self, config: Config) -> None:
        import wandb

        self._run = wandb.init(
            mode="offline",
            dir=config.run.run_dir,
            project="tfbig",
            name=config.run.run_dir,
            config=dict(_options(config)),
        )

    def on_step(self, record: dict[str, Any]) -> None:
        scalars = scalars_of(record, "train") | source_scalars(record)
        self._run.log(scalars, step=record["step"])

    def on_evaluation(self, record: dict[str, Any]) -> None:
        self._run.log(scalars_of(record, "validation"), step=record["step"])

    def on_stop(self, progress: Progress, reason: str) -> None:
        self._run.finish(exit_code=0)


def tracker_hooks(config: Config) -> list[Hook]:
    """Returns the hook of --tracker, none without."""
    hooks: dict[str, type[MlflowHook] | type[WandbHook]] = {
        "mlflow": MlflowHook,
        "wandb": WandbHook,
    }
    tracker = config.profile.tracker
    return [hooks[tracker](config)] if tracker != "none" else []
