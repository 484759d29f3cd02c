"""All rules by name, and what they see together."""

from collections.abc import Mapping, Sequence

from tfbig.errors import UserError, near_matches
from tfbig.profiler.rules import (
    data_rules,
    host_rules,
    loss_rules,
    progress_rules,
    step_rules,
    tensor_rules,
)
from tfbig.profiler.rules.rule import Finding, Rule, with_parameters
from tfbig.profiler.run_data import RunData

_RULES: tuple[type[Rule], ...] = (
    # SageMaker Debugger's profiler rules; its ProfilerReport is `look_at` and the report.
    host_rules.BatchSize,
    host_rules.CPUBottleneck,
    host_rules.IOBottleneck,
    host_rules.LowGPUUtilization,
    host_rules.GPUMemoryIncrease,
    host_rules.LoadBalancing,
    step_rules.StepOutlier,
    progress_rules.MaxInitializationTime,
    data_rules.Dataloader,
    host_rules.OverallSystemUsage,
    step_rules.OverallFrameworkMetrics,
    # Ours.
    data_rules.DataWorkers,
    data_rules.DataWait,
    step_rules.Straggler,
    host_rules.PinnedCore,
    step_rules.MemoryLeak,
    loss_rules.LossSpike,
    step_rules.Recompilation,
    step_rules.PipelineBubble,
    step_rules.ExposedCommunication,
    # SageMaker Debugger's tensor rules.
    loss_rules.LossNotDecreasing,
    tensor_rules.VanishingGradient,
    tensor_rules.ExplodingTensor,
    tensor_rules.DeadRelu,
    tensor_rules.SaturatedActivation,
    loss_rules.Overfit,
    loss_rules.Overtraining,
    tensor_rules.WeightUpdateRatio,
    tensor_rules.AllZero,
    tensor_rules.UnchangedTensor,
    tensor_rules.PoorWeightInitialization,
    progress_rules.StalledTraining,
    data_rules.NLPSequenceRatio,
    tensor_rules.TensorVariance,
)
RULES: Mapping[str, type[Rule]] = {rule.__name__: rule for rule in _RULES}


def look_at(run: RunData, settings: Mapping[str, str] | None = None) -> list[Finding]:
    """Returns every rule's finding, those that fired first, by what they could save.

    Args:
      run: to look at.
      settings: parameters by <Rule>_<parameter>.

    Raises:
      UserError: no such rule or parameter.
    """
    findings = [rule.look(run) for rule in with_parameters(RULES, settings or {})]
    return sorted(findings, key=lambda f: (not f.triggered, -f.gain, not f.datapoints))


def check_names(names: Sequence[str]) -> None:
    """Checks that rules exist.

    Raises:
      UserError: one does not.
    """
    for name in names:
        if name not in RULES:
            near = near_matches(name, list(RULES)) or f" Take one of {', '.join(sorted(RULES))}."
            raise UserError(f"there is no rule {name!r}.{near}")


def description(name: str) -> str:
    """Returns what a rule is about, in one line."""
    return (RULES[name].__doc__ or "").splitlines()[0]
