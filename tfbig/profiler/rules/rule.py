"""What a rule is: parameters with their defaults, and a look at a run that gives one finding."""

import abc
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tfbig.errors import UserError, near_matches
from tfbig.profiler.run_data import RunData


@dataclass(frozen=True)
class Finding:
    """What one rule saw in one run; the names are those of smdebug's JSON.

    Args:
      rule: its name.
      triggered: whether it fired.
      datapoints: looked at; 0 where the rule has nothing to look at.
      violations: datapoints that broke it.
      evidence: one sentence with the numbers.
      change: what to do, as flags where there are some.
      gain: share of the run's step time that the change could save at most; 0 where it saves none.
      benefit: what the change is good for where that is no time.
      parameters: of the rule.
      details: numbers for tables.
    """

    rule: str
    triggered: bool
    datapoints: int
    violations: int
    evidence: str
    change: str = ""
    gain: float = 0.0
    benefit: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def expected(self) -> str:
        """What the change is expected to bring, in words."""
        if self.gain >= 0.01:
            return f"up to {100 * self.gain:.0f}% of the steps' time"
        return self.benefit or ("less than 1% of the steps' time" if self.triggered else "")

    def to_dict(self) -> dict[str, Any]:
        """Returns it under smdebug's names, ready for JSON."""
        return {
            "RuleName": self.rule,
            "RuleTriggered": int(self.triggered),
            "Violations": self.violations,
            "Datapoints": self.datapoints,
            "RuleParameters": dict(self.parameters),
            "Evidence": self.evidence,
            "Change": self.change,
            "Gain": self.gain,
            "Benefit": self.benefit,
            "Details": dict(self.details),
        }


@dataclass(frozen=True)
class Rule(abc.ABC):
    """A rule; a subclass's fields are its parameters, its docstring is its description."""

    kind: ClassVar[str] = "profiler"
    benefit: ClassVar[str] = ""  # of the change, where it is no time

    @abc.abstractmethod
    def look(self, run: RunData) -> Finding:
        """Returns what the rule sees in a run."""

    @property
    def name(self) -> str:
        """The rule's name."""
        return type(self).__name__

    def found(
        self,
        triggered: bool,
        datapoints: int,
        violations: int,
        evidence: str,
        change: str = "",
        gain: float = 0.0,
        benefit: str = "",
        **details: Any,
    ) -> Finding:
        """Returns a finding of this rule; a rule that did not fire proposes nothing."""
        return Finding(
            rule=self.name,
            triggered=bool(triggered),
            datapoints=int(datapoints),
            violations=int(violations),
            evidence=evidence,
            change=change if triggered else "",
            gain=float(min(1.0, max(0.0, gain))) if triggered else 0.0,
            benefit=(benefit or self.benefit) if triggered else "",
            parameters=dataclasses.asdict(self),
            details=details,
        )

    def nothing(self, why: str) -> Finding:
        """Returns the finding of a rule that has nothing to look at."""
        return self.found(False, 0, 0, why)


def with_parameters(rules: Mapping[str, type[Rule]], settings: Mapping[str, str]) -> list[Rule]:
    """Returns all rules, with parameters replaced.

    Args:
      rules: by name.
      settings: values by <Rule>_<parameter>, as SageMaker's ProfilerReport takes them.

    Raises:
      UserError: no such rule or parameter, or no number.
    """
    changed: dict[str, dict[str, float]] = {}
    for key, text in settings.items():
        rule, _, parameter = key.partition("_")
        if rule not in rules:
            raise UserError(f"there is no rule {rule!r}.{near_matches(rule, list(rules))}")
        known = [item.name for item in dataclasses.fields(rules[rule])]
        if parameter not in known:
            raise UserError(f"{rule} has no parameter {parameter!r}: it has {', '.join(known)}.")
        try:
            changed.setdefault(rule, {})[parameter] = float(text)
        except ValueError:
            raise UserError(f"{key}={text} is not a number.") from None
    return [cls(**changed.get(name, {})) for name, cls in rules.items()]
