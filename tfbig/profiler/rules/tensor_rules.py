"""SageMaker Debugger's rules of losses and tensors, at its documented defaults."""

import abc
import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tfbig.profiler.rules.rule import Finding, Rule
from tfbig.profiler.run_data import RunData
from tfbig.profiler.tensor_statistics import by_tensor

_NO_TENSORS = "no tensor was looked at (--tensor_stats_every)"


@dataclass(frozen=True)
class TensorRule(Rule):
    """A rule that looks at every record of a kind of tensor."""

    kind: ClassVar[str] = "tensor"
    tensor_kind: ClassVar[str] = "weight"
    change: ClassVar[str] = ""
    what: ClassVar[str] = ""

    @abc.abstractmethod
    def is_bad(self, record: dict[str, Any]) -> bool:
        """Whether a record breaks the rule."""

    def look(self, run: RunData) -> Finding:
        kinds = ("weight", "gradient") if self.tensor_kind == "any" else (self.tensor_kind,)
        records = [record for record in run.tensors if record["kind"] in kinds]
        if not records:
            return self.nothing(_NO_TENSORS)
        bad = [record for record in records if self.is_bad(record)]
        evidence = f"no {self.what} in {len(records)} looks"
        if bad:
            names = list(dict.fromkeys(record["name"] for record in bad))
            evidence = f"{self.what}: {', '.join(names[:4])}, first at step {bad[0]['step']}"
        return self.found(bool(bad), len(records), len(bad), evidence, self.change)


@dataclass(frozen=True)
class VanishingGradient(TensorRule):
    """Gradients (AdamW's moving average of them) are nearly zero."""

    tensor_kind: ClassVar[str] = "gradient"
    change: ClassVar[str] = (
        "a higher --init_std, --norm_order=pre, or --precision=bfloat16 instead of float16"
    )
    what: ClassVar[str] = "vanishing gradient"
    threshold: float = 1e-7

    def is_bad(self, record: dict[str, Any]) -> bool:
        # Before the first step's update the average is nothing yet.
        return record["mean_abs"] < self.threshold and record["step"] > 1


@dataclass(frozen=True)
class ExplodingTensor(TensorRule):
    """A tensor, the loss or the gradient's norm is infinite or not a number."""

    tensor_kind: ClassVar[str] = "any"
    change: ClassVar[str] = (
        "a lower --learning_rate, --clip_norm=1, --max_loss, longer --warmup_steps"
    )
    what: ClassVar[str] = "infinite or undefined values"
    only_nan: float = 0

    def is_bad(self, record: dict[str, Any]) -> bool:
        return record["nonfinite"] > 0

    def look(self, run: RunData) -> Finding:
        steps = run.train.of("step")
        loss, norm = run.train.of("loss"), run.train.of("grad_norm")
        values = np.stack([loss, norm])
        bad = np.isnan(values) if self.only_nan else ~np.isfinite(values)
        # A skipped update of float16's loss scaling is no fault: the scale then fits.
        bad[1] &= run.train.of("applied") == 1
        tensors = super().look(run)
        places = np.flatnonzero(bad.any(axis=0))
        if not len(places):
            return self.found(
                tensors.triggered,
                tensors.datapoints + len(steps),
                tensors.violations,
                tensors.evidence if tensors.datapoints else "loss and gradient are finite",
                self.change,
            )
        evidence = f"loss or gradient is not finite, first at step {int(steps[places[0]])}"
        count = tensors.violations + len(places)
        return self.found(True, tensors.datapoints + len(steps), count, evidence, self.change)


@dataclass(frozen=True)
class WeightUpdateRatio(TensorRule):
    """Updates are very large or very small beside the weights."""

    change: ClassVar[str] = "another --learning_rate: lower where the ratio is large"
    what: ClassVar[str] = "updates out of proportion"
    large_threshold: float = 10.0
    small_threshold: float = 1e-8

    def is_bad(self, record: dict[str, Any]) -> bool:
        ratio = record.get("update_ratio")
        # Weights that start at zero, biases, have no proportion at first.
        if ratio is None or record["mean_abs"] == 0 or record["step"] == 1:
            return False
        return ratio > self.large_threshold or ratio < self.small_threshold


@dataclass(frozen=True)
class AllZero(TensorRule):
    """All values of a weight that should not be are zero."""

    change: ClassVar[str] = "look at its --init_std, and whether anything reaches it"
    what: ClassVar[str] = "weights that are all zero"
    threshold: float = 100  # percent

    def is_bad(self, record: dict[str, Any]) -> bool:
        # Biases and norm offsets start at zero.
        return 100 * record["zero_fraction"] >= self.threshold and record["step"] > 1


@dataclass(frozen=True)
class TensorVariance(TensorRule):
    """Values of a weight matrix are all alike, or spread enormously."""

    change: ClassVar[str] = "look at --init_std and --weight_decay"
    what: ClassVar[str] = "weights without spread, or with too much"
    min_threshold: float = 1e-12
    max_threshold: float = 1e4

    def is_bad(self, record: dict[str, Any]) -> bool:
        if not record["name"].endswith(("kernel", "embeddings", "token_emb")) or record["size"] < 2:
            return False
        return not self.min_threshold <= record["std"] ** 2 <= self.max_threshold


@dataclass(frozen=True)
class DeadRelu(TensorRule):
    """More than half of a ReLU layer's units give zero nearly always."""

    tensor_kind: ClassVar[str] = "activation"
    change: ClassVar[str] = "a lower --learning_rate, or --activation=gelu_tanh"
    what: ClassVar[str] = "dead ReLU layers"
    threshold_inactivity: float = 1.0  # percent of the inputs below which a unit counts as dead
    threshold_layer: float = 50.0  # percent of a layer's units

    def is_bad(self, record: dict[str, Any]) -> bool:
        return 100 * record["dead_fraction"] > self.threshold_layer


@dataclass(frozen=True)
class SaturatedActivation(TensorRule):
    """More than half of a layer's units are where their nonlinearity is flat."""

    tensor_kind: ClassVar[str] = "activation"
    change: ClassVar[str] = "a smaller --init_std or a lower --learning_rate"
    what: ClassVar[str] = "saturated layers"
    threshold_layer: float = 50.0

    def is_bad(self, record: dict[str, Any]) -> bool:
        return 100 * record["saturated_fraction"] > self.threshold_layer


@dataclass(frozen=True)
class UnchangedTensor(Rule):
    """A weight does not change from step to step."""

    kind: ClassVar[str] = "tensor"
    num_looks: float = 3

    def look(self, run: RunData) -> Finding:
        names, total = [], 0
        for name, records in by_tensor(run.tensors, "weight").items():
            # The last update of a schedule that ends at zero changes nothing either.
            flags = [r["unchanged"] for r in records if "unchanged" in r and r["step"] > 1]
            total += len(flags)
            count = int(self.num_looks)
            if any(all(flags[i : i + count]) for i in range(len(flags) - count + 1)):
                names.append(name)
        if not total:
            return self.nothing(_NO_TENSORS)
        evidence = (
            f"{len(names)} weights do not change: {', '.join(names[:4])}"
            if names
            else ("every weight changes")
        )
        return self.found(bool(names), total, len(names), evidence, "a higher --learning_rate")


@dataclass(frozen=True)
class PoorWeightInitialization(Rule):
    """Weights or gradients of the first steps differ wildly from layer to layer."""

    kind: ClassVar[str] = "tensor"
    threshold: float = 10.0  # ratio of the largest to the smallest standard deviation
    distribution_range: float = 0.001  # of absolute gradients, from p5 to p95
    patience: float = 5
    steps: float = 10

    def look(self, run: RunData) -> Finding:
        first = [r for r in run.tensors if r["step"] <= self.steps]
        layers: dict[str, list[float]] = {}
        for record in first:
            if record["kind"] == "weight" and record["name"].startswith("transformer_blocks/"):
                _, _, inner = record["name"].split("/", 2)
                if inner.endswith("kernel") and record["std"] > 0:
                    layers.setdefault(inner, []).append(record["std"])
        if not first:
            return self.nothing(_NO_TENSORS)
        uneven = {
            name: max(values) / min(values)
            for name, values in layers.items()
            if max(values) / min(values) > self.threshold
        }
        gradients = [r for r in first if r["kind"] == "gradient" and r["step"] > 1]
        flat = [r for r in gradients if r["p95_abs"] - r["p5_abs"] < self.distribution_range]
        all_flat = (
            len(gradients) >= self.patience
            and len(flat) == len(gradients)
            and all(r["p95_abs"] < 1e-6 for r in gradients)
        )
        evidence = "the layers start alike"
        if uneven:
            evidence = f"standard deviations differ between layers: {', '.join(uneven)}"
        elif all_flat:
            evidence = "all gradients of the first steps are nearly zero"
        bad = bool(uneven) or all_flat
        return self.found(bad, len(first), len(uneven), evidence, "another --init_std")


@dataclass(frozen=True)
class LossNotDecreasing(Rule):
    """The loss does not fall over some steps."""

    kind: ClassVar[str] = "tensor"
    num_steps: float = 10
    diff_percent: float = 0.1
    increase_threshold_percent: float = 5
    smoothing: float = 20  # steps in a mean, without which any step's noise is a rise

    def look(self, run: RunData) -> Finding:
        loss = run.train.of("loss")
        width = int(max(self.num_steps, self.smoothing))
        if len(loss) < 2 * width:
            return self.found(False, len(loss), 0, f"{len(loss)} steps are too few to tell")
        blocks = loss[: len(loss) // width * width].reshape(-1, width)
        means = np.array(
            [
                block[np.isfinite(block)].mean() if np.isfinite(block).any() else np.inf
                for block in blocks
            ]
        )
        noise = np.nanstd(np.diff(loss[np.isfinite(loss)])) / np.sqrt(width)
        fall = means[:-1] - means[1:]
        flat = fall < self.diff_percent / 100 * np.abs(means[:-1])
        rises = -fall > self.increase_threshold_percent / 100 * np.abs(means[:-1])
        # A run that has learned what it can falls more slowly than its noise.
        stalled = flat & (means[:-1] > means.min() + 2 * noise)
        bad = bool(rises.any()) or bool(stalled[-3:].all() and len(stalled) >= 3)
        bad = bad or bool(means[-1] >= means[0] - noise)
        evidence = f"the mean loss goes from {means[0]:.3f} to {means[-1]:.3f}"
        if rises.any():
            step = int(run.train.of("step")[width * (int(np.argmax(rises)) + 1)])
            evidence += (
                f"; it rises by more than {self.increase_threshold_percent:g}% near step {step}"
            )
        change = "another --learning_rate or longer --warmup_steps; see the source losses"
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
        change = "more data, fewer --steps, --dropout=0.1 or a higher --weight_decay"
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
        change = "stop here: the best checkpoint is kept (--keep_best)"
        return self.found(worse == count, len(validation), worse, evidence, change)


@dataclass(frozen=True)
class StalledTraining(Rule):
    """Nothing was heard of the run for long, and it has not ended."""

    kind: ClassVar[str] = "tensor"
    threshold: float = 1800  # seconds

    def look(self, run: RunData) -> Finding:
        times = np.sort(
            np.concatenate([run.train.columns["time"], [event["time"] for event in run.events]])
        )
        if not len(times):
            return self.nothing("nothing is recorded")
        starts = [e["time"] for e in run.events if e["event"] == "start"]
        gaps = np.diff(times)
        # Between a stop and the next start nothing is expected.
        inside = np.array(
            [not any(a < s <= b for s in starts) for a, b in itertools.pairwise(times)],
            bool,
        )
        longest = float(gaps[inside].max()) if inside.any() else 0.0
        return self.found(
            longest > self.threshold,
            len(times),
            int((gaps[inside] > self.threshold).sum()) if inside.any() else 0,
            f"the longest silence was {longest:.1f} s",
            "see which rank is silent: SIGTERM saves what is there",
        )


@dataclass(frozen=True)
class NLPSequenceRatio(Rule):
    """Much of each sequence is padding (or masked), which is computed and not learned."""

    kind: ClassVar[str] = "tensor"
    threshold: float = 50  # percent

    def look(self, run: RunData) -> Finding:
        tokens = run.train.of("num_tokens")
        samples = np.diff(np.concatenate([[0.0], run.train.of("consumed_samples")]))
        if not len(tokens):
            return self.nothing("no step is recorded")
        positions = np.maximum(samples[1:], 1) * run.config["data"]["sequence_length"]
        share = 100 * (1 - tokens[1:] / positions) if len(tokens) > 1 else np.zeros(1)
        mean = float(share.mean())
        fired = mean > self.threshold
        change = "prepare with --packing=best_fit or join, or a shorter --sequence_length"
        evidence = f"{mean:.1f}% of the positions are not learned from"
        return self.found(
            fired, len(tokens), int((share > self.threshold).sum()), evidence, change, mean / 100
        )
