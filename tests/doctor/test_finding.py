"""Findings of several hosts: what they share is said once, what differs is named."""

import json

from tfbig.diagnosis.finding import Examined, Finding, HostReport, differing_facts, guarded, merged
from tfbig.diagnosis.page import as_json, in_order, page


def report(rank, host, facts=(), findings=()):
    return HostReport(rank, host, tuple(findings), dict(facts))


def test_a_report_survives_json():
    one = report(1, "b", {"python": "3.11"}, [Finding("disk", "warning", "slow", "mend", ("b",))])
    assert HostReport.from_dict(json.loads(json.dumps(one.to_dict()))) == one


def test_the_odd_host_is_named():
    facts = [("a", "2.3"), ("b", "2.3"), ("c", "2.2")]
    reports = [report(i, host, {"numpy": v}) for i, (host, v) in enumerate(facts)]
    (found,) = differing_facts(reports)
    assert (found.group, found.level, found.hosts) == ("versions", "problem", ("c",))
    assert found.text == "numpy differs: 2.2 on c; 2.3 on a, b"
    assert not differing_facts(reports[:2])


def test_a_package_that_one_host_lacks_differs_but_gpus_are_asked_once_a_host():
    reports = [report(0, "a", {"NCCL": "2.27", "GPUs": "2 x L4"}), report(1, "a", {"NCCL": "2.27"})]
    assert not differing_facts(reports)
    reports.append(report(2, "b", {"GPUs": "2 x T4"}))
    assert [f.text.split(":")[0] for f in differing_facts(reports)] == [
        "GPUs differs",
        "NCCL differs",
    ]


def test_what_all_hosts_have_found_is_one_line_without_names():
    same, own = Finding("disk", "fine", "room"), Finding("disk", "problem", "full")
    found = merged([report(0, "a", (), [same]), report(1, "b", (), [same, own])])
    assert [(f.text, f.hosts) for f in found] == [("room", ()), ("full", ("b",))]


def test_a_check_that_breaks_is_a_problem_and_stops_nothing():
    def check() -> Examined:
        raise KeyError("speed")

    (found,) = guarded("network", check).findings
    assert found.level == "problem" and "KeyError: 'speed'" in found.text


def test_problems_come_first_and_are_counted():
    findings = [
        Finding("versions", "fine", "all equal"),
        Finding("bandwidth", "warning", "a-b slow", "look"),
        Finding("limits", "problem", "10 files", "ulimit", ("b",)),
        Finding("disk", "problem", "full", "free some"),
    ]
    assert [f.group for f in in_order(findings)] == ["disk", "limits", "bandwidth", "versions"]
    lines = page(findings, 2, 4, colour=False).splitlines()
    assert lines[0] == "PROBLEM  disk       full" and lines[1].strip() == "-> free some"
    assert lines[2].endswith("b: 10 files")
    assert lines[-1] == "2 problems, 1 warning on 2 hosts with 4 ranks"
    assert "\033[31;1mPROBLEM" in page(findings, 2, 4, colour=True)
    values = json.loads(as_json(findings, [report(0, "a", {"python": "3.11"})]))
    assert (values["problems"], values["warnings"]) == (2, 1)
    assert values["findings"][0]["text"] == "full"
    assert values["ranks"] == [{"rank": 0, "host": "a", "facts": {"python": "3.11"}}]
