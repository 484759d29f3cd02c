"""The training loop: steps, evaluations, checkpoints, and a way out. Knows only the contract."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tfbig.config import Config
from tfbig.hardware import peak_memory_bytes
from tfbig.metrics import StepTimes, Throughput, train_record
from tfbig.schedule import global_batch, learning_rate
from tfbig.step_spans import Spans, StepSpans
from tfbig.stop_signal import STOP, StopSignal


class Progress(NamedTuple):
    """Where a run stands; all that a resume needs besides the variables."""

    step: int  # optimizer updates made, skipped ones included
    consumed_samples: int


class Hook:
    """Watches a run; every method may be left out. Hooks run on every rank, in order."""

    def on_start(self, progress: Progress, resumed: bool) -> None:
        """Called before the first step."""

    def on_compiled(self, seconds: float) -> None:
        """Called when the first step of this process has run, tracing included."""

    def on_step(self, record: dict[str, Any]) -> None:
        """Called with each step's record, one step late where steps follow each other."""

    def on_spans(self, spans: StepSpans) -> None:
        """Called with when the parts of each step ran on this rank, before its record."""

    def samples(self, step: int) -> bool:
        """Returns whether a step is to run alone, between the two calls below."""
        return False

    def on_sample_begin(self, step: int) -> None:
        """Called before a sampled step is launched; the one before it has ended."""

    def on_sample_end(self, step: int) -> None:
        """Called after a sampled step, when its result has been read."""

    def on_evaluation(self, record: dict[str, Any]) -> None:
        """Called after each evaluation."""

    def on_checkpoint(self, step: int, seconds: float) -> None:
        """Called after each checkpoint."""

    def on_stop(self, progress: Progress, reason: str) -> None:
        """Called once, at the end."""


class _Pending(NamedTuple):
    """A step that is launched and whose result is not read yet."""

    progress: Progress
    learning_rate: float
    result: Any
    communication: Callable[[], dict[str, float]]
    spans: Callable[[], Spans]
    start: float
    start_time: float  # the same, in seconds since 1970
    data_wait: float
    num_samples: int


@dataclass
class Loop:
    """Trains to `config.run.steps`.

    Args:
      config: the run.
      trainer: built, with the run's state in it.
      batches: from the next sample on, one a step.
      evaluate: returns the validation measures; called on every rank.
      save: writes a checkpoint of (progress, metadata); called on every rank.
      hooks: see Hook.
      throughput: for rates.
      stop_signal: entered; polled each step.
    """

    config: Config
    trainer: Any
    batches: Iterator[Any]
    evaluate: Callable[[], dict[str, float]]
    save: Callable[[Progress, dict[str, Any]], None]
    hooks: Sequence[Hook]
    throughput: Throughput
    stop_signal: StopSignal

    def run(self, progress: Progress, resumed: bool = False) -> str:
        """Trains from `progress` on.

        Returns:
          Why it ended: "done" or the signal.
        """
        self._call("on_start", progress, resumed)
        self._evaluation: dict[str, Any] = {}
        self._saved_step = progress.step if resumed else -1
        self._stopping = False
        pending: _Pending | None = None
        first = True
        while progress.step < self.config.run.steps and not self._stopping:
            sampling = [hook for hook in self.hooks if hook.samples(progress.step + 1)]
            if sampling and pending is not None:
                self._finish(pending)
                pending = None
            for hook in sampling:
                hook.on_sample_begin(progress.step + 1)
            launched = self._launch(progress)
            progress = launched.progress
            if first:
                launched.result.loss_sum.numpy()
                self._call("on_compiled", time.perf_counter() - launched.start)
                first = False
            if pending is not None:
                # Steady state: a step lasts until the next one is launched.
                self._finish(pending, launched.start)
            pending = launched
            if sampling:
                self._finish(pending)
                pending = None
                for hook in sampling:
                    hook.on_sample_end(progress.step)
            if self._is_due(progress.step) or self._stopping:
                if pending is not None:
                    self._finish(pending)
                pending = None
                self._pause(progress)
        if pending is not None:
            self._finish(pending)
        if self._saved_step != progress.step:
            self._checkpoint(progress)
        reason = "signal" if self._stopping else "done"
        self._call("on_stop", progress, reason)
        return reason

    def _launch(self, progress: Progress) -> _Pending:
        """Starts one optimizer update."""
        start, start_time = time.perf_counter(), time.time()
        batch = next(self.batches)
        data_wait = time.perf_counter() - start
        rate = learning_rate(self.config.optimizer, progress.step, self.trainer.num_replicas)
        result = self.trainer.train_step(
            batch, progress.step, rate, self.config.run.max_loss, self.stop_signal.value
        )
        num_samples = global_batch(self.config.run, progress.consumed_samples)
        after = Progress(progress.step + 1, progress.consumed_samples + num_samples)
        communication, spans = self.trainer.timings(), self.trainer.spans()
        return _Pending(
            after, rate, result, communication, spans, start, start_time, data_wait, num_samples
        )

    def _finish(self, pending: _Pending, end: float | None = None) -> None:
        """Reads a step's result and reports it; without `end` it lasted until now."""
        signal = int(pending.result.signal)  # waits for the step
        seconds = (end or time.perf_counter()) - pending.start
        times = StepTimes(seconds, pending.data_wait, pending.communication())
        self._call(
            "on_spans",
            StepSpans(
                pending.progress.step, pending.start_time, *times.as_tuple(), pending.spans()
            ),
        )
        record = train_record(
            pending.progress.step,
            pending.progress.consumed_samples,
            pending.learning_rate,
            pending.result,
            times,
            self.throughput.at_batch(pending.num_samples / self.config.run.global_batch),
            peak_memory_bytes(),
        )
        self._call("on_step", record)
        self._stopping = self._stopping or signal >= STOP

    def _is_due(self, step: int) -> bool:
        run = self.config.run
        every = (run.eval_every, run.checkpoint_every)
        return step == run.steps or any(n and step % n == 0 for n in every)

    def _pause(self, progress: Progress) -> None:
        """Evaluates and saves where that is due; none of it counts as a step's time."""
        run = self.config.run
        last = progress.step == run.steps
        if (last or (run.eval_every and progress.step % run.eval_every == 0)) and (
            not self._stopping
        ):
            start = time.perf_counter()
            measures = self.evaluate()
            self._evaluation = {
                "kind": "eval",
                "step": progress.step,
                "time": time.time(),
                "consumed_samples": progress.consumed_samples,
                **measures,
                "seconds": time.perf_counter() - start,
            }
            self._call("on_evaluation", self._evaluation)
        if last or (run.checkpoint_every and progress.step % run.checkpoint_every == 0):
            self._checkpoint(progress)

    def _checkpoint(self, progress: Progress) -> None:
        start = time.perf_counter()
        fresh = self._evaluation.get("step") == progress.step
        self.save(progress, {"eval_loss": self._evaluation["loss"]} if fresh else {})
        self._saved_step = progress.step
        self._call("on_checkpoint", progress.step, time.perf_counter() - start)

    def _call(self, method: str, *arguments: Any) -> None:
        for hook in self.hooks:
            getattr(hook, method)(*arguments)
