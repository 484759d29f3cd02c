"""The doctor's page, and its JSON. TensorFlow-free."""

import json
import os
import sys
from collections.abc import Sequence

from tfbig.diagnosis.finding import GROUPS, Finding, HostReport

_MARKS = {"problem": "PROBLEM", "warning": "warning", "fine": "ok"}
_COLOURS = {"problem": "31;1", "warning": "33", "fine": "32"}  # ECMA-48: red, yellow, green


def in_order(findings: Sequence[Finding]) -> list[Finding]:
    """Returns problems first, then warnings, then the rest, each by group."""
    levels = list(_MARKS)
    return sorted(findings, key=lambda f: (levels.index(f.level), GROUPS.index(f.group)))


def page(findings: Sequence[Finding], num_hosts: int, num_ranks: int, colour: bool) -> str:
    """Returns the page.

    Args:
      findings: in any order.
      num_hosts: that were looked at.
      num_ranks: on them.
      colour: whether to write terminal colours.
    """
    lines = []
    for finding in in_order(findings):
        mark = f"{_MARKS[finding.level]:<8}"
        if colour:
            mark = f"\033[{_COLOURS[finding.level]}m{mark}\033[0m"
        where = f"{', '.join(finding.hosts)}: " if finding.hosts else ""
        lines.append(f"{mark} {finding.group:<10} {where}{finding.text}")
        if finding.advice:
            lines.append(f"{'':<20}-> {finding.advice}")
    lines.append(verdict(findings, num_hosts, num_ranks))
    return "\n".join(lines)


def verdict(findings: Sequence[Finding], num_hosts: int, num_ranks: int) -> str:
    """Returns the last line: how much was found where."""
    problems = sum(f.level == "problem" for f in findings)
    warnings = sum(f.level == "warning" for f in findings)
    return (
        f"{problems} problem{'s' * (problems != 1)}, {warnings} warning{'s' * (warnings != 1)} on "
        f"{num_hosts} host{'s' * (num_hosts != 1)} with {num_ranks} rank{'s' * (num_ranks != 1)}"
    )


def as_json(findings: Sequence[Finding], reports: Sequence[HostReport]) -> str:
    """Returns one line of JSON with all findings, red first, and each rank's facts."""
    return json.dumps(
        {
            "problems": sum(f.level == "problem" for f in findings),
            "warnings": sum(f.level == "warning" for f in findings),
            "findings": [vars(f) | {"hosts": list(f.hosts)} for f in in_order(findings)],
            "ranks": [
                {"rank": report.rank, "host": report.host, "facts": dict(report.facts)}
                for report in reports
            ],
        }
    )


def wants_colour() -> bool:
    """Returns whether standard output is a terminal that colours are wanted on (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
