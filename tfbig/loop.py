"""The training loop: steps, evaluations, checkpoints, and a way out. Knows only the contract."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from tfbig.bad_steps import BadStep, BadSteps
from tfbig.config import Config
from tfbig.errors import WorldChanged
from tfbig.hardware import peak_memory_bytes, steps_overlap
from tfbig.heartbeat import Pulse
from tfbig.metrics import StepTimes, Throughput, train_record
from tfbig.saving import Saved
from tfbig.schedule import global_batch, learning_rate
from tfbig.step_spans import Spans, StepSpans
from tfbig.stop_signal import RESHAPE, STOP, StopSignal


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

    def on_sample_batch(self, batch: Any) -> None:
        """Called with a sampled step's batch, of this rank, once it is launched."""

    def on_sample_end(self, step: int) -> None:
        """Called after a sampled step, when its result has been read."""

    def on_evaluation(self, record: dict[str, Any]) -> None:
        """Called after each evaluation."""

    def on_checkpoint(self, step: int, seconds: float) -> None:
        """Called when a checkpoint is complete, at the next step or the run's end."""

    def on_save_wait(self, seconds: float) -> None:
        """Called with the time in which training stood still for a checkpoint, before the above."""

    def on_event(self, event: str, reason: str, **fields: Any) -> None:
        """Called when something happened that is none of the above, such as a bad step."""

    def on_stop(self, progress: Progress, reason: str) -> None:
        """Called once, at the end of a run that made its steps or was told to stop."""

    def close(self) -> None:
        """Called however the run ends, after on_stop if at all."""


class Saver(Protocol):
    """What the loop needs of run_state.StateKeeper."""

    def save(self, progress: Progress, metadata: dict[str, Any]) -> None: ...

    def finished(self, wait: bool = False) -> list[Saved]: ...


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
    batch: Any
    max_loss: float


@dataclass
class Loop:
    """Trains to `config.run.steps`.

    Args:
      config: the run.
      trainer: built, with the run's state in it.
      open_batches: gives, from a point of the run on, one batch a step.
      evaluate: returns the validation measures, or None when a rank was told to stop meanwhile;
        called on every rank.
      saver: saves checkpoints; called alike on every rank.
      hooks: see Hook.
      throughput: for rates.
      stop_signal: entered; polled each step.
      bad_steps: judges each step.
      examine: returns what is known of a step's samples, of (first sample, batch); called on
        every rank.
      reload: loads the newest checkpoint and returns where it stood, None without one; called on
        every rank.
      pulse: is told where the loop is.
      sources: names of the data's, for records.
    """

    config: Config
    trainer: Any
    open_batches: Callable[[Progress], Iterator[Any]]
    evaluate: Callable[[], dict[str, float] | None]
    saver: Saver
    hooks: Sequence[Hook]
    throughput: Throughput
    stop_signal: StopSignal
    bad_steps: BadSteps
    examine: Callable[[int, Any], dict[str, Any]] = lambda first_sample, batch: {}
    reload: Callable[[], Progress | None] = lambda: None
    pulse: Pulse = field(default_factory=Pulse)
    sources: Sequence[str] = ()

    def _begin(self, progress: Progress, resumed: bool, owes_pause: bool) -> None:
        """Sets what a run keeps from step to step; arguments as for `run`."""
        self._call("on_start", progress, resumed)
        self.progress = progress
        self._evaluation: dict[str, Any] = {}
        self._saved_step = progress.step if resumed and not owes_pause else -1
        self._paused_step = -1 if owes_pause else progress.step
        self._stopping, self._reshaping, self._phase = False, False, "compile"
        self._batches = self.open_batches(progress)
        self._bad: tuple[_Pending, BadStep] | None = None
        self._out: list[_Pending] = []

    def run(self, progress: Progress, resumed: bool = False, owes_pause: bool = False) -> str:
        """Trains from `progress` on.

        Args:
          progress: where the run stands.
          resumed: whether another loop brought it there.
          owes_pause: whether that one left the step's evaluation and checkpoint undone.

        Returns:
          Why it ended: "done" or the signal.

        Raises:
          WorldChanged: a step's signal says that ranks are to come or go.
        """
        self._begin(progress, resumed, owes_pause)
        first, overlap = True, steps_overlap()
        if owes_pause:
            self._pause(progress)
        while self.progress.step < self.config.run.steps and not self._stopping:
            self._report_saves()
            sampling = [hook for hook in self.hooks if hook.samples(self.progress.step + 1)]
            if sampling:
                self._finish_all()
            for hook in sampling:
                hook.on_sample_begin(self.progress.step + 1)
            launched = self._launch(self.progress)
            for hook in sampling:
                hook.on_sample_batch(launched.batch)
            self._out.append(launched)
            self.progress = launched.progress
            if first:
                launched.result.loss_sum.numpy()
                self._call("on_compiled", time.perf_counter() - launched.start)
                first, self._phase = False, "step"
            if not overlap:  # nothing runs beside the next step: it can know this one's signal
                self._heed(int(launched.result.signal))
            # Steady state: a step lasts until the next one is launched.
            self._finish_all(but=1, end=launched.start)
            leaving = self._stopping or self._reshaping
            if sampling or self._is_due(self.progress.step) or leaving:
                self._finish_all()
                for hook in sampling:
                    hook.on_sample_end(self.progress.step)
            is_back = self._bad is not None and self._roll_back(*self._bad)
            self._bad = None
            if is_back:
                self._out.clear()  # what was launched meanwhile is void
            elif not self._out and (self._is_due(self.progress.step) or self._stopping):
                self._pause(self.progress)
            if self._reshaping and not self._out:
                self._let_ranks_come_and_go()
        self._finish_all()
        if self._saved_step != self.progress.step:
            self._checkpoint(self.progress)
        self.pulse.enter("save")
        self._report_saves(wait=True)
        reason = "signal" if self._stopping else "done"
        self._call("on_stop", self.progress, reason)
        return reason

    def settle(self) -> Progress:
        """Records, after the engine has failed, the steps it had made before; returns the last.

        Calls no collective. A bad step, which changed nothing, is to be made again: the ranks have
        not looked at its samples together.
        """
        while self._out:
            pending = self._out.pop(0)
            record, after = self._read(pending), pending.progress
            if self.bad_steps.judge(record, pending.max_loss) is None:
                self._call("on_step", record)
            else:
                self._out.clear()
                self.progress = Progress(
                    after.step - 1, after.consumed_samples - pending.num_samples
                )
        return self.progress

    @property
    def owes_pause(self) -> bool:
        """Whether an evaluation or a checkpoint is due where the loop stands."""
        step = self.progress.step
        return step != self._paused_step and self._is_due(step)

    def _heed(self, signal: int) -> None:
        self._stopping = self._stopping or signal >= STOP
        self._reshaping = self._reshaping or signal == RESHAPE

    def _let_ranks_come_and_go(self) -> None:
        """Leaves the loop between two steps, unless it ends here anyway."""
        if self._stopping or self.progress.step >= self.config.run.steps:
            return
        self.pulse.enter("save")
        self._report_saves(wait=True)
        raise WorldChanged("hosts were added or taken away")

    def _finish_all(self, but: int = 0, end: float | None = None) -> None:
        """Finishes steps that are out, all but the last `but` ones."""
        while len(self._out) > but:
            self._finish(self._out[0], end)
            self._out.pop(0)

    def _launch(self, progress: Progress) -> _Pending:
        """Starts one optimizer update."""
        start, start_time = time.perf_counter(), time.time()
        self.pulse.enter("data", progress.step)
        batch = next(self._batches)
        data_wait = time.perf_counter() - start
        self.pulse.enter(self._phase, progress.step + 1)
        rate = learning_rate(self.config.optimizer, progress.step, self.trainer.num_replicas)
        limit = self.bad_steps.limit(progress.step + 1)
        result = self.trainer.train_step(batch, progress.step, rate, limit, self.stop_signal.value)
        num_samples = global_batch(self.config.run, progress.consumed_samples)
        after = Progress(progress.step + 1, progress.consumed_samples + num_samples)
        communication, spans = self.trainer.timings(), self.trainer.spans()
        return _Pending(
            after,
            rate,
            result,
            communication,
            spans,
            start,
            start_time,
            data_wait,
            num_samples,
            batch,
            limit,
        )

    def _finish(self, pending: _Pending, end: float | None = None) -> None:
        """Reads a step's result, reports and judges it; without `end` it lasted until now."""
        record = self._read(pending, end)
        self._call("on_step", record)
        bad = self.bad_steps.judge(record, pending.max_loss)
        if bad is not None:
            self._bad = pending, bad
            first_sample = pending.progress.consumed_samples - pending.num_samples
            found = self.examine(first_sample, pending.batch)
            self._call("on_event", "bad_step", bad.reason, step=bad.step, **found)
            self.bad_steps.count(bad)

    def _read(self, pending: _Pending, end: float | None = None) -> dict[str, Any]:
        """Returns a step's record; waits for its result, and heeds its signal."""
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
            self.sources,
        )
        self.pulse.note_times(times)
        self._heed(signal)
        return record | self.pulse.slowest | {"world_size": self.trainer.size}

    def _roll_back(self, pending: _Pending, bad: BadStep) -> bool:
        """Goes back to the newest checkpoint, and on with the samples after the bad step's.

        Between a checkpoint and a spike lies what led to it: going back and leaving those samples
        out is what PaLM's authors did (arXiv 2204.02311, section 5.1).

        Returns:
          Whether it has; not where skipping is the policy, or where there is no checkpoint.
        """
        if self.config.robustness.bad_step_policy != "rollback":
            return False
        self.pulse.enter("rollback")
        self._report_saves(wait=True)
        old = self.reload()
        if old is None:
            return False
        self.bad_steps.roll_back(bad, old.step)
        consumed = pending.progress.consumed_samples
        fields = {"step": bad.step, "to_step": old.step}
        fields |= {"first_sample": old.consumed_samples, "last_sample": consumed - 1}
        self._call("on_event", "rollback", f"these samples are left out: {bad.reason}", **fields)
        self.progress = Progress(old.step, consumed)
        self._saved_step = -1 if self._stopping else old.step
        self._batches = self.open_batches(self.progress)
        return True

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
            self.pulse.enter("evaluation")
            measures = self.evaluate()
            if measures is None:
                self._stopping = True  # the checkpoint is made on the way out
                return
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
        self._paused_step = progress.step

    def _checkpoint(self, progress: Progress) -> None:
        self.pulse.enter("save")
        fresh = self._evaluation.get("step") == progress.step
        metadata = {"eval_loss": self._evaluation["loss"]} if fresh else {}
        start = time.perf_counter()
        self.saver.save(progress, {**metadata, "recent_losses": self.bad_steps.losses()})
        self._call("on_save_wait", time.perf_counter() - start)
        self._saved_step = progress.step

    def _report_saves(self, wait: bool = False) -> None:
        """Reports the saves that have ended, and raises what one of them failed with."""
        start = time.perf_counter()
        done = self.saver.finished(wait)
        if wait:
            self._call("on_save_wait", time.perf_counter() - start)
        for saved in done:
            self._call("on_checkpoint", saved.step, saved.seconds)

    def _call(self, method: str, *arguments: Any, **fields: Any) -> None:
        for hook in self.hooks:
            getattr(hook, method)(*arguments, **fields)
