"""What watches a run: records on disk, TensorBoard, the progress line. Only rank 0 has them."""

import os
import sys
from collections.abc import Mapping
from typing import Any

import psutil
from rich.console import Console
from rich.live import Live
from rich.text import Text

from tfbig.command import BEGAN_VARIABLE
from tfbig.config import Config
from tfbig.loop import Hook, Progress
from tfbig.metrics import source_scalars
from tfbig.run_folder import RunFolder
from tfbig.trackers import tracker_hooks


class RecordHook(Hook):
    """Appends to metrics.jsonl and events.jsonl.

    Args:
      folder: the run's.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._metrics, self._events = folder.open_metrics(), folder.open_events()
        self._is_first, self._save_wait = True, 0.0

    def on_start(self, progress: Progress, resumed: bool) -> None:
        reason = f"resumed at step {progress.step}" if resumed else "new run"
        begin = float(os.environ.get(BEGAN_VARIABLE) or psutil.Process().create_time())
        self._events.write_event("start", reason, step=progress.step, process_start=begin)

    def on_compiled(self, seconds: float) -> None:
        self._events.write_event("compile", "first call of the step", seconds=seconds)

    def on_step(self, record: dict[str, Any]) -> None:
        self._metrics.write(record)
        if self._is_first:
            self._events.write_event("first_step", "its result is read", step=record["step"])
            self._is_first = False

    def on_evaluation(self, record: dict[str, Any]) -> None:
        self._metrics.write(record)
        self._events.write_event(
            "evaluation", "due", step=record["step"], seconds=record["seconds"]
        )

    def on_save_wait(self, seconds: float) -> None:
        self._save_wait += seconds

    def on_checkpoint(self, step: int, seconds: float) -> None:
        # Most of its seconds may lie beside training, in the thread that writes.
        waited, self._save_wait = self._save_wait, 0.0
        self._events.write_event(
            "checkpoint", "saved", step=step, seconds=seconds, wait_seconds=waited
        )

    def on_event(self, event: str, reason: str, **fields: Any) -> None:
        self._events.write_event(event, reason, **fields)

    def on_stop(self, progress: Progress, reason: str) -> None:
        if reason == "signal":
            self._events.write_event("signal", "a rank was told to stop", step=progress.step)
        self._events.write_event("stop", reason, step=progress.step)
        self._metrics.close()
        self._events.close()


class TensorBoardHook(Hook):
    """Writes scalars for TensorBoard.

    Args:
      folder: the run's.
    """

    _SCALARS = ("loss", "learning_rate", "grad_norm", "tokens_per_second", "mfu", "step_seconds")

    def __init__(self, folder: RunFolder) -> None:
        import tensorflow as tf

        self._summary = tf.summary
        self._writer = tf.summary.create_file_writer(str(folder.tensorboard_dir))

    def on_step(self, record: dict[str, Any]) -> None:
        scalars = {f"train/{name}": record[name] for name in self._SCALARS}
        self._write(scalars | source_scalars(record), record["step"])

    def on_evaluation(self, record: dict[str, Any]) -> None:
        names = ("loss", "perplexity", "bits_per_byte", "accuracy")
        scalars = {f"validation/{name}": record[name] for name in names if name in record}
        self._write(scalars, record["step"])

    def on_checkpoint(self, step: int, seconds: float) -> None:
        self._writer.flush()

    def on_stop(self, progress: Progress, reason: str) -> None:
        self._writer.close()

    def _write(self, scalars: Mapping[str, float | None], step: int) -> None:
        with self._writer.as_default(step=step):
            for name, value in scalars.items():
                if value is not None:
                    self._summary.scalar(name, value)


class ProgressHook(Hook):
    """Shows how far the run is: a live line on a terminal, plain lines elsewhere.

    Args:
      config: the run.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._recent: list[float] = []
        self._is_first = True

    def on_start(self, progress: Progress, resumed: bool) -> None:
        if resumed:
            self._console.print(f"step {progress.step:>6}  going on from its checkpoint")
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()

    def on_step(self, record: dict[str, Any]) -> None:
        line = self._line(record)
        every = self._config.run.log_every
        if self._live is not None:
            self._live.update(Text(line))
        if record["step"] % every == 0 or record["step"] == 1 or not record["applied"]:
            self._console.print(line)

    def on_evaluation(self, record: dict[str, Any]) -> None:
        parts = [
            f"step {record['step']:>6}  validation loss {record['loss']:.4f}",
            f"perplexity {record['perplexity']:.2f}",
            f"accuracy {record['accuracy']:.4f}",
        ]
        if "bits_per_byte" in record:
            parts.append(f"bits per byte {record['bits_per_byte']:.4f}")
        self._console.print("  ".join(parts))

    def on_checkpoint(self, step: int, seconds: float) -> None:
        self._console.print(f"step {step:>6}  checkpoint saved in {seconds:.1f} s")

    def on_event(self, event: str, reason: str, **fields: Any) -> None:
        samples = ""
        if "first_sample" in fields:
            samples = f" (samples {fields['first_sample']} to {fields['last_sample']})"
        self._console.print(
            f"step {fields.get('step', ''):>6}  {event.replace('_', ' ')}: {reason}{samples}"
        )

    def on_stop(self, progress: Progress, reason: str) -> None:
        self.close()
        stopped = "stopped by a signal, saved; the same command goes on from here"
        text = "finished" if reason == "done" else stopped
        self._console.print(f"step {progress.step:>6}  {text}")

    def close(self) -> None:
        if self._live is not None:  # it hides the terminal's cursor
            self._live.stop()

    def _line(self, record: dict[str, Any]) -> str:
        parts = [f"step {record['step']:>6}/{self._config.run.steps}  loss {record['loss']:.4f}"]
        parts += self._rates(record)
        if not record["applied"]:
            parts.append("UPDATE SKIPPED")
        return "  ".join(parts)

    def _rates(self, record: dict[str, Any]) -> list[str]:
        seconds = record["step_seconds"]
        if self._is_first:  # its time is mostly tracing, which says nothing about the others
            self._is_first = False
            return [f"{seconds:.1f} s with tracing"]
        self._recent = [*self._recent[-19:], seconds]
        median = sorted(self._recent)[len(self._recent) // 2]
        rates = [f"{record['tokens_per_second']:,.0f} tokens/s"]
        if record["mfu"] is not None:
            rates.append(f"MFU {record['mfu']:.1%} of {record['peak_flops'] / 1e9:,.0f} GFLOP/s")
        left = median * (self._config.run.steps - record["step"])
        return [*rates, f"{_clock(left)} left"]


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def main_rank_hooks(config: Config, folder: RunFolder) -> list[Hook]:
    """Returns the hooks of rank 0: records on disk first, the screen last."""
    hooks: list[Hook] = [RecordHook(folder)]
    if config.run.tensorboard:
        hooks.append(TensorBoardHook(folder))
    return [*hooks, *tracker_hooks(config), ProgressHook(config)]
