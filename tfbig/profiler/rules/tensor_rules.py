"""SageMaker Debugger's rules of tensors, at its documented defaults."""

import abc
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
    change: ClassVar[str] = ""  # {fields} are those of `values_for`
    benefit: ClassVar[str] = "no time; steps that learn"
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
        change = self.change.format(**values_for(run))
        return self.found(bool(bad), len(records), len(bad), evidence, change)


def values_for(run: RunData) -> dict[str, float]:
    """Returns options' values that a change may propose, by name."""
    model, optimizer = run.config["model"], run.config["optimizer"]
    return {
        "half_rate": optimizer["learning_rate"] / 2,
        "double_rate": 2 * optimizer["learning_rate"],
        "warmup": 2 * max(1, optimizer["warmup_steps"]),
        "small_std": model["init_std"] / 2,
        "large_std": 2 * model["init_std"],
        "decay": optimizer["weight_decay"] / 2,
    }


@dataclass(frozen=True)
class VanishingGradient(TensorRule):
    """Gradients (a block's norm of them, or AdamW's moving average) are nearly zero."""

    tensor_kind: ClassVar[str] = "gradient"
    change: ClassVar[str] = (
        "--init_std={large_std:g}, --norm_order=pre, or --precision=bfloat16 instead of float16"
    )
    what: ClassVar[str] = "vanishing gradient"
    threshold: float = 1e-7

    def is_bad(self, record: dict[str, Any]) -> bool:
        # Before the first step's update the average is nothing yet.
        return record["mean_abs"] < self.threshold and record["step"] > 1

    def look(self, run: RunData) -> Finding:
        tensors, norms = super().look(run), run.train.layer_norms[run.train.kept]
        model, optimizer = run.config["model"], run.config["optimizer"]
        if norms.shape[1] < 3 or optimizer["freeze"] or model["lora_rank"]:  # frozen ones have none
            return tensors
        # The mean of n absolute values is at most their norm over sqrt(n), and a block has more
        # than 4 D^2 weights: below this norm the mean is below the threshold for certain.
        limit = self.threshold * 2 * model["embed_dim"]
        with np.errstate(invalid="ignore"):
            low = norms[:, 1:-1] < limit  # (steps, blocks)
        count = tensors.datapoints + low.size
        if not low.any() or tensors.triggered:
            fired = tensors.triggered
            evidence = tensors.evidence if fired else f"no {self.what} in {count} looks"
            change = self.change.format(**values_for(run))
            return self.found(fired, count, tensors.violations, evidence, change)
        step, block = np.argwhere(low)[0]
        steps = run.train.columns["step"][run.train.kept]
        evidence = f"{self.what}: transformer_blocks/{block}, first at step {int(steps[step])}"
        change = self.change.format(**values_for(run))
        return self.found(True, count, int(low.sum()), evidence, change)


@dataclass(frozen=True)
class ExplodingTensor(TensorRule):
    """A tensor, the loss or the gradient's norm is infinite or not a number."""

    tensor_kind: ClassVar[str] = "any"
    change: ClassVar[str] = (
        "--learning_rate={half_rate:g}, --clip_norm=1 or --warmup_steps={warmup}"
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
        tensors, change = super().look(run), self.change.format(**values_for(run))
        places = np.flatnonzero(bad.any(axis=0))
        if not len(places):
            return self.found(
                tensors.triggered,
                tensors.datapoints + len(steps),
                tensors.violations,
                tensors.evidence if tensors.datapoints else "loss and gradient are finite",
                change,
            )
        evidence = f"loss or gradient is not finite, first at step {int(steps[places[0]])}"
        count = tensors.violations + len(places)
        return self.found(True, tensors.datapoints + len(steps), count, evidence, change)


@dataclass(frozen=True)
class WeightUpdateRatio(TensorRule):
    """Updates are very large or very small beside the weights."""

    change: ClassVar[str] = (
        "--learning_rate={half_rate:g} where the ratio is large, {double_rate:g} where it is small"
    )
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

    change: ClassVar[str] = "--init_std={large_std:g}; look whether anything reaches it"
    what: ClassVar[str] = "weights that are all zero"
    threshold: float = 100  # percent

    def is_bad(self, record: dict[str, Any]) -> bool:
        # Biases and norm offsets start at zero.
        return 100 * record["zero_fraction"] >= self.threshold and record["step"] > 1


@dataclass(frozen=True)
class TensorVariance(TensorRule):
    """Values of a weight matrix are all alike, or spread enormously."""

    change: ClassVar[str] = "--init_std={small_std:g} or --weight_decay={decay:g}"
    what: ClassVar[str] = "weights without spread, or with too much"
    min_threshold: float = 1e-12
    max_threshold: float = 1e4

    def is_bad(self, record: dict[str, Any]) -> bool:
        if not record["name"].endswith(("kernel", "embeddings", "token_emb")) or record["size"] < 2:
            return False
        return not self.min_threshold <= record["std"] ** 2 <= self.max_threshold


@dataclass(frozen=True)
class ActivationRule(TensorRule):
    """A rule of units that hardly ever leave where their nonlinearity is flat."""

    tensor_kind: ClassVar[str] = "activation"
    functions: ClassVar[tuple[str, ...]] = ()
    threshold_inactivity: float = 1.0  # percent of the inputs below which a unit is inactive
    threshold_layer: float = 50.0  # percent of a layer's units

    def is_bad(self, record: dict[str, Any]) -> bool:
        # The percentiles 0 to 100, over the layer's units, of their share of active inputs.
        active = np.array(record["active_percentiles"])
        inactive = 100 * float((active < self.threshold_inactivity).mean())
        return record["function"] in self.functions and inactive > self.threshold_layer


@dataclass(frozen=True)
class DeadRelu(ActivationRule):
    """More than half of a ReLU layer's units give zero nearly always."""

    functions: ClassVar[tuple[str, ...]] = ("relu",)
    change: ClassVar[str] = "--learning_rate={half_rate:g}, or --activation=gelu_tanh"
    what: ClassVar[str] = "dead ReLU layers"


@dataclass(frozen=True)
class SaturatedActivation(ActivationRule):
    """More than half of a layer's units are nearly always where their nonlinearity is flat."""

    functions: ClassVar[tuple[str, ...]] = ("gelu", "gelu_tanh")
    change: ClassVar[str] = "--init_std={small_std:g} or --learning_rate={half_rate:g}"
    what: ClassVar[str] = "saturated layers"


@dataclass(frozen=True)
class UnchangedTensor(Rule):
    """A weight does not change from step to step."""

    kind: ClassVar[str] = "tensor"
    benefit: ClassVar[str] = "no time; steps that learn"
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
        change = f"--learning_rate={values_for(run)['double_rate']:g}"
        return self.found(bool(names), total, len(names), evidence, change)


@dataclass(frozen=True)
class PoorWeightInitialization(Rule):
    """Weights or gradients of the first steps differ wildly from layer to layer."""

    kind: ClassVar[str] = "tensor"
    benefit: ClassVar[str] = "no time; steps that learn"
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
        change = f"--init_std={values_for(run)['large_std']:g}, or a smaller one"
        return self.found(bad, len(first), len(uneven), evidence, change)
