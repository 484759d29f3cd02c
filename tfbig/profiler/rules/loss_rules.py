"""Rules of the losses: SageMaker Debugger's at its documented defaults, and spikes."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tfbig.profiler.robust import spread, spread_of_rows
from tfbig.profiler.rules.rule import Finding, Rule
from tfbig.profiler.run_data import RunData

_FIRST_SPIKE = 10  # steps before which nothing is expected of the loss
_CHUNK = 8192


def expectations(loss: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns what each step's loss (n,) should be by those before it, and their noise (n,).

    Early the loss falls quickly: the median of the last five is expected. Its noise is the spread
    of the changes from step to step within the window.
    """
    count = len(loss)
    expected, noise = np.full(count, np.inf), np.full(count, np.inf)
    places = np.maximum.accumulate(np.where(np.isfinite(loss), np.arange(count), 0))
    known = loss[places] if count else loss
    for index in range(_FIRST_SPIKE, min(window, count)):
        expected[index] = np.median(known[index - 5 : index])
        noise[index] = spread(np.diff(known[:index]))
    if count > window:
        windows = np.lib.stride_tricks.sliding_window_view(known[:-1], window)
        for start in range(0, len(windows), _CHUNK):
            part = windows[start : start + _CHUNK]  # (steps, window), each before its step
            target = slice(window + start, window + start + len(part))
            expected[target] = np.median(part[:, -5:], axis=1)
            changes = np.diff(part, axis=1)
            noise[target] = spread_of_rows(changes)
    return expected, np.maximum(noise, 1e-9)


@dataclass(frozen=True)
class LossSpike(Rule):
    """The loss jumps up within a step."""

    benefit: ClassVar[str] = "no time of steps; those that learn again what a spike undid"
    deviations: float = 8
    min_rise: float = 5  # percent
    window: float = 50

    def look(self, run: RunData) -> Finding:
        loss, steps = run.train.of("loss"), run.train.of("step").astype(int)
        expected, noise = expectations(loss, int(self.window))
        with np.errstate(invalid="ignore"):
            jump = loss - expected
            is_spike = (jump > self.deviations * noise) & (
                jump > self.min_rise / 100 * np.abs(expected)
            )
        is_spike |= ~np.isfinite(loss)
        spikes = [int(index) for index in np.flatnonzero(is_spike) if index >= _FIRST_SPIKE]
        evidence = "the loss has no jumps"
        if spikes:
            worst = max(spikes, key=lambda i: loss[i] if np.isfinite(loss[i]) else np.inf)
            evidence = (
                f"the loss jumps at {len(spikes)} steps, first at step {steps[spikes[0]]}, most at"
                f" step {steps[worst]}, to {loss[worst]:.3f}"
            )
        change = self._change(run, expected, spikes[0], steps[spikes[0]]) if spikes else ""
        return self.found(
            bool(spikes),
            len(loss),
            len(spikes),
            evidence,
            change,
            steps=steps[spikes][:50].tolist(),
        )

    def _change(self, run: RunData, expected: np.ndarray, first: int, step: int) -> str:
        optimizer = run.config["optimizer"]
        limit = 1.5 * float(expected[first])
        return (
            f"--max_loss={limit:.3g} skips such updates; --learning_rate="
            f"{optimizer['learning_rate'] / 2:g} or --warmup_steps="
            f"{2 * max(1, optimizer['warmup_steps'])} makes them rarer; python -m tfbig.data"
            f" inspect --step={step} shows what was learned there"
        )


@dataclass(frozen=True)
class LossNotDecreasing(Rule):
    """The loss does not fall over some steps."""

    kind: ClassVar[str] = "tensor"
    benefit: ClassVar[str] = "no time; steps that learn"
    num_steps: float = 10  # between two means that are compared
    diff_percent: float = 0.1
    increase_threshold_percent: float = 5
    smoothing: float = 20  # steps in a mean, without which any step's noise is a rise

    def look(self, run: RunData) -> Finding:
        loss = run.train.of("loss")
        width, apart = int(self.smoothing), max(1, int(self.num_steps))
        if len(loss) < 2 * width:
            return self.found(False, len(loss), 0, f"{len(loss)} steps are too few to tell")
        ends = np.arange(width, len(loss) + 1, apart)
        finite = np.isfinite(loss)
        sums = np.concatenate([[0.0], np.cumsum(np.where(finite, loss, 0.0))])
        known = np.concatenate([[0], np.cumsum(finite)])
        counts = known[ends] - known[ends - width]
        means = np.where(
            counts > 0, (sums[ends] - sums[ends - width]) / np.maximum(counts, 1), np.inf
        )
        noise = float(np.nanstd(np.diff(loss[finite]))) / np.sqrt(width)
        with np.errstate(invalid="ignore"):
            fall = means[:-1] - means[1:]
        flat = fall < self.diff_percent / 100 * np.abs(means[:-1])
        rises = -fall > self.increase_threshold_percent / 100 * np.abs(means[:-1])
        # A run that has learned what it can falls more slowly than its noise.
        stalled = flat & (means[:-1] > means.min() + 2 * noise)
        long = int(np.ceil(3 * width / apart))  # comparisons without a fall that are no chance
        bad = bool(rises.any()) or (len(stalled) >= long and bool(stalled[-long:].all()))
        bad = bad or bool(means[-1] >= means[0] - noise)
        evidence = f"the mean loss goes from {means[0]:.3f} to {means[-1]:.3f}"
        rate = run.config["optimizer"]["learning_rate"]
        change = f"--learning_rate={2 * rate:g}, or half of it; see the losses by source"
        if rises.any():
            step = int(run.train.of("step")[ends[int(np.argmax(rises)) + 1] - 1])
            evidence += (
                f"; it rises by more than {self.increase_threshold_percent:g}% near step {step}"
            )
            warmup = 2 * max(1, run.config["optimizer"]["warmup_steps"])
            change = f"--learning_rate={rate / 2:g} or --warmup_steps={warmup}"
        return self.found(bad, len(means), int(flat.sum()), evidence, change)


def _validation(run: RunData) -> tuple[np.ndarray, np.ndarray]:
    """Returns (validation loss, training loss before it) of each evaluation."""
    steps, loss = run.train.of("step"), run.train.of("loss")
    pairs = []
    for record in run.evaluations:
        before = loss[(steps <= record["step"]) & (steps > record["step"] - 20)]
        if len(before) and record["loss"] is not None:
            pairs.append((record["loss"], float(before.mean())))
    found = np.array(pairs).reshape(-1, 2)
    return found[:, 0], found[:, 1]


@dataclass(frozen=True)
class Overfit(Rule):
    """The validation loss is far above the training loss."""

    kind: ClassVar[str] = "tensor"
    benefit: ClassVar[str] = "no time; a lower validation loss"
    patience: float = 1
    ratio_threshold: float = 0.1

    def look(self, run: RunData) -> Finding:
        validation, training = _validation(run)
        if not len(validation):
            return self.nothing("no evaluation")
        ratio = (validation - training) / np.maximum(training, 1e-9)
        bad = ratio > self.ratio_threshold
        evidence = (
            f"at the last evaluation the validation loss is {100 * ratio[-1]:+.1f}% of training's"
        )
        fired = bool(bad[-1]) and int(bad.sum()) > self.patience
        decay = 2 * run.config["optimizer"]["weight_decay"] or 0.1
        change = f"more data, fewer --steps, --dropout=0.1 or --weight_decay={decay:g}"
        return self.found(fired, len(ratio), int(bad.sum()), evidence, change)


@dataclass(frozen=True)
class Overtraining(Rule):
    """Neither training nor validation loss gets better any more."""

    kind: ClassVar[str] = "tensor"
    patience_train: float = 5
    patience_validation: float = 10
    delta: float = 0.01

    def look(self, run: RunData) -> Finding:
        validation, _ = _validation(run)
        count = int(self.patience_validation)
        if len(validation) <= count:
            return self.found(
                False, len(validation), 0, f"{len(validation)} evaluations are too few"
            )
        best = validation[:-count].min()
        worse = int((validation[-count:] > best - self.delta).sum())
        evidence = (
            f"the best validation loss is {validation.min():.4f}, the last {validation[-1]:.4f}"
        )
        best_step = int(run.evaluations[int(np.argmin(validation))]["step"])
        made = float(run.train.of("step")[-1])
        change = f"--steps={best_step}, where the loss was best; --keep_best keeps that checkpoint"
        gain = 1 - best_step / made
        return self.found(worse == count, len(validation), worse, evidence, change, gain)
