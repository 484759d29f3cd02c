"""What a check has found on one host, and what must be equal on all of them. TensorFlow-free."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Level = Literal["problem", "warning", "fine"]
HASH_FACTS = ("data manifest", "tokenizer")
ASKED_ONCE_A_HOST = ("GPUs", "GPU driver")
GROUPS = ("versions", "devices", "network", "disk", "limits", "hashes", "bandwidth")


@dataclass(frozen=True)
class Finding:
    """One line of the page.

    Args:
      group: of checks, one of GROUPS.
      level: a problem ends or spoils a run, a warning costs time.
      text: what was seen, with the numbers.
      advice: what to do; empty where nothing is to be done.
      hosts: that it holds for; empty means all of them, or the cluster.
    """

    group: str
    level: Level
    text: str
    advice: str = ""
    hosts: tuple[str, ...] = ()


@dataclass
class Examined:
    """What one process found of its host.

    Args:
      findings: in the order of the checks.
      facts: by name, what all processes must have equal.
    """

    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)

    def add(self, group: str, level: Level, text: str, advice: str = "") -> None:
        """Adds a finding."""
        self.findings.append(Finding(group, level, text, advice))


@dataclass(frozen=True)
class HostReport:
    """What one rank sends to rank 0."""

    rank: int
    host: str
    findings: tuple[Finding, ...]
    facts: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Returns it ready for JSON."""
        return {
            "rank": self.rank,
            "host": self.host,
            "findings": [vars(finding) for finding in self.findings],
            "facts": dict(self.facts),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "HostReport":
        """Returns what `to_dict` has written."""
        findings = (Finding(**f | {"hosts": tuple(f["hosts"])}) for f in values["findings"])
        return cls(values["rank"], values["host"], tuple(findings), values["facts"])


def guarded(group: str, check: Callable[[], Examined]) -> Examined:
    """Returns what a check found; one that breaks is a problem of its own and stops no other."""
    try:
        return check()
    except Exception as error:
        found = Examined()
        found.add(
            group,
            "problem",
            f"the check itself failed: {type(error).__name__}: {error}",
            "this is a fault of tfbig: report it with this line",
        )
        return found


def differing_facts(reports: Sequence[HostReport]) -> list[Finding]:
    """Returns a problem for each fact that isn't equal on all ranks.

    The rarest values are named with their hosts.
    """
    names = sorted({name for report in reports for name in report.facts})
    found = []
    for name in names:
        hosts: dict[str, list[str]] = {}
        for report in reports:
            if name in ASKED_ONCE_A_HOST and name not in report.facts:
                continue
            hosts.setdefault(report.facts.get(name, "absent"), []).append(report.host)
        if len(hosts) < 2:
            continue
        by_count = sorted(hosts.items(), key=lambda item: (len(item[1]), item[0]))
        shown = "; ".join(f"{value} on {', '.join(dict.fromkeys(on))}" for value, on in by_count)
        odd = tuple(dict.fromkeys(host for _, on in by_count[:-1] for host in on))
        group = "hashes" if name in HASH_FACTS else "versions"
        group = "devices" if name in ASKED_ONCE_A_HOST else group
        found.append(
            Finding(group, "problem", f"{name} differs: {shown}", _EQUALISE.get(group, ""), odd)
        )
    return found


_EQUALISE = {
    "versions": "install the same packages and the same code everywhere",
    "devices": "take hosts of one kind: the slowest device sets the pace",
    "hashes": "give all hosts the same data folder",
}


def merged(reports: Sequence[HostReport]) -> list[Finding]:
    """Returns the findings of all hosts, those that several share as one."""
    everyone = {report.host for report in reports}
    hosts: dict[tuple[str, Level, str, str], list[str]] = {}
    for report in reports:
        for f in report.findings:
            hosts.setdefault((f.group, f.level, f.text, f.advice), []).append(report.host)
    return [
        Finding(*key, hosts=() if set(on) == everyone else tuple(dict.fromkeys(on)))
        for key, on in hosts.items()
    ]
