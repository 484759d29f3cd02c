"""Shows, after 20 steps of a run, what was predicted of them. train hands it in; rank 0 has it."""

from pathlib import Path
from typing import Any

import orjson

from tfbig.config import Config
from tfbig.durable_file import write_atomic
from tfbig.errors import UserError
from tfbig.loop import Hook, Progress
from tfbig.planner.prediction import PREDICTION_FILE, Machines, Measured, measured_of, predict_run

AFTER_STEPS = 20


class PredictionHook(Hook):
    """Writes prediction.json at the start and prints a comparison after 20 steps.

    Args:
      config: of the run.
      machines: that it runs on.
      folder: of the run.
    """

    def __init__(self, config: Config, machines: Machines, folder: Path) -> None:
        self._prediction = predict_run(config, machines)
        self._path = folder / PREDICTION_FILE
        self._records: list[dict[str, Any]] = []

    def on_start(self, progress: Progress, resumed: bool) -> None:
        write_atomic(self._path, orjson.dumps(self._prediction, option=orjson.OPT_INDENT_2) + b"\n")

    def on_step(self, record: dict[str, Any]) -> None:
        if len(self._records) < AFTER_STEPS:
            self._records.append(record)
            if len(self._records) == AFTER_STEPS:
                print(self.line(), flush=True)

    def line(self) -> str:
        """Returns predicted against measured, in a line."""
        try:
            measured = measured_of(self._records)
        except UserError as error:
            return str(error)
        return compared_line(self._prediction, measured)


def compared_line(prediction: dict[str, Any], measured: Measured) -> str:
    """Returns a prediction and what was measured, in a line."""
    seen = measured.peak_memory_bytes / 1e9
    if "step_seconds" not in prediction:
        return (
            f"predicted: {prediction['tensor_bytes'] / 1e9:.3f} GB of tensors a rank; measured:"
            f" {measured.step_seconds:.3f} s a step, {seen:.3f} GB with the process"
            " (`tfbig plan --measure` lets train predict both)"
        )
    seconds, memory = prediction["step_seconds"], prediction["measurable_bytes"] / 1e9
    late = measured.step_seconds / seconds - 1
    return (
        f"predicted {seconds:.3f} s a step, {memory:.3f} GB; measured"
        f" {measured.step_seconds:.3f} s ({late:+.0%}), {seen:.3f} GB ({seen / memory - 1:+.0%})"
    )
