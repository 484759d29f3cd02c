"""What a report of one run says, section by section."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from tfbig.profiler import figures
from tfbig.profiler.document import Document, Section, Table
from tfbig.profiler.energy import Energy, energy_of
from tfbig.profiler.energy_assumptions import Assumptions
from tfbig.profiler.goodput import Ledger, ledger_of, ledger_rows, meaning
from tfbig.profiler.rules.catalogue import description, look_at
from tfbig.profiler.rules.rule import Finding
from tfbig.profiler.run_data import RunData, capture_path
from tfbig.profiler.step_table import describe_rank
from tfbig.profiler.summary import hidden_share, summarise, verdict_of
from tfbig.profiler.xprof_operators import xprof_operators

_PERCENTILES = ("max", "p99", "p95", "p50", "min")


def report_of(
    run: RunData, assumptions: Assumptions, settings: Mapping[str, str] | None = None
) -> Document:
    """Returns the report of a run.

    Args:
      run: finished or in training.
      assumptions: of the energy.
      settings: of rules, by <Rule>_<parameter>.
    """
    ledger, energy = ledger_of(run), energy_of(run, assumptions)
    findings = look_at(run, settings)
    numbers = summarise(run, ledger, energy)
    sections = [
        summary_section(run, numbers),
        curves_section(run),
        split_section(run),
        steps_section(run),
        ledger_section(ledger),
        hosts_section(run, findings),
        memory_section(run),
        sources_section(run),
        energy_section(energy, numbers),
        rules_section(findings),
        measuring_section(run),
    ]
    return Document(
        title=f"Run {run.folder.path.name}",
        verdict=verdict_of(run, numbers, ledger, findings),
        sections=[section for section in sections if section is not None],
        numbers={
            "run": str(run.folder.path),
            **numbers,
            "rules": [finding.to_dict() for finding in findings],
        },
    )


def summary_section(run: RunData, numbers: Mapping[str, Any]) -> Section:
    """Returns who, what, when."""
    versions = ", ".join(f"{name} {version}" for name, version in run.record["versions"].items())
    stop = next((e for e in reversed(run.events) if e["event"] == "stop"), None)
    begun = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(_begin(run)))
    peak = numbers["peak_flops"]
    rows = [
        ["begun", begun],
        ["ended", stop["reason"] if stop else "still training, or ended without a word"],
        ["command", " ".join(run.record["command"])],
        ["versions", versions],
        ["steps", numbers["steps"]],
        ["tokens learned from", int(numbers["tokens"])],
        ["ranks, hosts", f"{numbers['ranks']}, {numbers['hosts']}"],
        ["seconds of a step, median", numbers["step_seconds"]],
        ["tokens/s, median", numbers["tokens_per_second"]],
        ["MFU, median", numbers["mfu"]],
        ["peak it divides by, GFLOP/s", peak / 1e9 if peak else None],
        ["loss, mean of the last tenth", numbers["loss"]],
        ["validation loss", numbers["validation_loss"]],
        ["bits per byte", numbers["bits_per_byte"]],
    ]
    return Section("Summary", tables=[Table(["", "value"], rows)])


def _begin(run: RunData) -> float:
    return run.events[0]["time"] if run.events else run.record["time"]


def curves_section(run: RunData) -> Section | None:
    """Returns the learning curves."""
    if not run.train.num_steps:
        return Section("Learning", ["No step is recorded yet."])
    return Section(
        "Learning",
        figures=[
            ("Loss, learning rate, gradient norm.", figures.curves(run)),
            ("Speed, without the first step. MFU as PaLM defines it.", figures.rates(run)),
        ],
    )


def split_section(run: RunData) -> Section | None:
    """Returns what captured steps were made of."""
    if not run.captures:
        return Section("A step's time", ["No step was captured: --profile_steps chooses some."])
    wall = sum(capture["wall_seconds"] for capture in run.captures)
    totals: dict[str, float] = {}
    for capture in run.captures:
        for part, seconds in capture["split"].items():
            totals[part] = totals.get(part, 0.0) + seconds
    steps = sorted({capture["step"] for capture in run.captures})
    count = len(run.captures)
    hidden = hidden_share(run)
    rows: list[list[Any]] = [
        [part, 1000 * seconds / count, 100 * seconds / wall] for part, seconds in totals.items()
    ]
    rows.append(["sum = wall time", 1000 * wall / count, 100.0])
    operators: dict[tuple[str, str], list[float]] = {}
    for capture in run.captures:
        for one in capture["operators"]:
            total = operators.setdefault((one["type"], one["phase"]), [0, 0.0])
            total[0] += one["count"]
            total[1] += one["seconds"]
    ordered = sorted(operators.items(), key=lambda item: -item[1][1])[:20]
    operator_rows = [
        [kind, phase, total[0] / count, 1000 * total[1] / count] for (kind, phase), total in ordered
    ]
    tables = [
        Table(["part", "ms", "%"], rows),
        Table(
            ["operation", "phase", "runs a step", "ms a step"],
            operator_rows,
            "The costliest operations. Side by side they may sum to more than the wall time.",
        ),
    ]
    first = run.captures[0]
    if "capture" in first and (by_xprof := xprof_operators(capture_path(run, first))):
        columns = ["host or device", "type", "operation", "runs", "self time, ms"]
        caption = f"By xprof: step {first['step']} on rank {first['rank']}."
        tables.append(Table(columns, by_xprof, caption))
    return Section(
        "A step's time",
        [
            f"Mean of the captured steps {', '.join(map(str, steps))} over"
            f" {len({c['rank'] for c in run.captures})} ranks, each run alone. Each instant counts"
            " once: computation before communication before the wait for data.",
            f"Communication hidden under computation: {100 * hidden:.1f}% of the wall time, counted"
            " there as computation.",
        ],
        tables,
        [("", figures.bar_of_shares({part: s / wall for part, s in totals.items()}))],
    )


def steps_section(run: RunData) -> Section | None:
    """Returns steps over time and ranks."""
    if len(run.step_seconds) < 2:
        return None
    section = Section(
        "Steps and ranks",
        figures=[
            ("Each step, rank 0.", figures.step_times(run)),
            ("How long steps took, up to the 99th percentile.", figures.step_histogram(run)),
        ],
    )
    names = run.rank_names()
    if len(names) > 1:
        section.paragraphs.append(
            "In a synchronous step all ranks end together. A rank's own work is its step's time"
            " without that in which it had a collective in flight: the slow rank's is longest."
        )
        own = run.matrix.own_seconds[:, 1:]
        medians = 1000 * np.nanmedian(own, axis=1)
        waits = 1000 * np.nanmedian(run.matrix.data_wait[:, 1:], axis=1)
        order = np.argsort(-medians)[:16]
        rows = [[names[i], float(medians[i]), float(waits[i])] for i in order]
        section.tables.append(
            Table(["rank", "own work, ms", "wait for data, ms"], rows, "Medians, slowest first.")
        )
        section.figures += [
            ("Own work by rank.", figures.rank_boxes(run, names)),
            (
                "Own work against the median rank's, over the steps.",
                figures.rank_heatmap(run.matrix, names),
            ),
        ]
    return section


def ledger_section(ledger: Ledger) -> Section:
    """Returns where the time went over restarts."""
    rows = [
        [row["part"], row["seconds"], 100 * row["share"], meaning(row["part"])]
        for row in ledger_rows(ledger)
    ]
    rows.append(["sum", float(sum(ledger.seconds.values())), 100.0, "since the first start"])
    shares = {part: s / ledger.total for part, s in ledger.seconds.items() if ledger.total}
    return Section(
        "Goodput",
        [
            f"{ledger.num_sessions} starts; {ledger.num_lost_steps} steps were made twice."
            f" Goodput: {100 * ledger.goodput:.1f}%."
        ],
        [Table(["part", "seconds", "%", "what it is"], rows)],
        [("", figures.bar_of_shares(shares))] if shares else [],
    )


def hosts_section(run: RunData, findings: Sequence[Finding]) -> Section:
    """Returns what the hosts did."""
    tables = [table for table in run.system if len(table.times)]
    if not tables:
        return Section("Hosts", ["No host was sampled (--noprofile)."])
    usage = next(finding for finding in findings if finding.rule == "OverallSystemUsage")
    rows = [
        [name, *(numbers[p] for p in _PERCENTILES)]
        for name, numbers in usage.details["metrics"].items()
    ]
    text = (
        "Each sample."
        if not tables[0].by_minute
        else "The run is long: drawn are minutes' medians; the table is of their quantiles."
    )
    return Section(
        "Hosts",
        [text],
        [Table(["host and metric", *_PERCENTILES], rows[:400])],
        [
            ("Over time.", figures.host_timelines(tables)),
            ("Use of each core and GPU.", figures.core_heatmap(tables)),
            ("Its distribution.", figures.use_boxes(tables)),
        ],
    )


def memory_section(run: RunData) -> Section | None:
    """Returns the memory of ranks."""
    names = run.rank_names()
    if not names:
        return None
    peak = run.train.of("peak_memory_bytes")
    text = f"Peak of rank 0: {np.nanmax(peak) / 2**20:,.0f} MB." if len(peak) else ""
    return Section("Memory", [text], figures=[("Resident, by rank.", figures.memory(run, names))])


def sources_section(run: RunData) -> Section | None:
    """Returns the loss by source of the data."""
    count = run.train.source_loss.shape[1]
    if not count:
        return None
    path = run.folder.profiler_dir / "sources.json"
    known = orjson.loads(path.read_bytes()) if path.exists() else []
    names = [*known, *(f"source {index}" for index in range(len(known), count))][:count]
    tail = slice(-max(1, run.train.num_steps // 10), None)
    loss, tokens = run.train.source_loss[tail], run.train.source_num_tokens[tail]
    total = np.nansum(tokens, axis=0)
    means = np.nansum(loss * tokens, axis=0) / np.maximum(total, 1)
    rows = [
        [name, float(mean) if seen else None, int(np.nansum(run.train.source_num_tokens[:, i]))]
        for i, (name, mean, seen) in enumerate(zip(names, means, total > 0, strict=True))
    ]
    return Section(
        "Sources",
        tables=[Table(["source", "loss, last tenth of the steps", "tokens"], rows)],
        figures=[("", figures.source_losses(run, names))],
    )


def energy_section(energy: Energy | None, numbers: Mapping[str, Any]) -> Section | None:
    """Returns energy and CO2, with what they rest on."""
    if energy is None:
        return None
    rows = [
        ["GPUs, kJ", energy.gpu / 1e3],
        ["CPUs, kJ", energy.cpu / 1e3],
        ["memory, kJ", energy.memory / 1e3],
        ["data centre, kJ", energy.overhead / 1e3],
        ["all, kWh", energy.joules / 3.6e6],
        ["J a token", numbers["joules_per_token"]],
        ["kg CO2", energy.kilograms],
    ]
    return Section("Energy", [f"Assumed: {energy.basis}."], [Table(["", "value"], rows)])


def rules_section(findings: Sequence[Finding]) -> Section:
    """Returns every rule."""
    rows = [
        [
            finding.rule,
            "FIRED" if finding.triggered else ("quiet" if finding.datapoints else "no data"),
            finding.violations,
            finding.datapoints,
            finding.evidence,
            finding.change,
            finding.expected,
            description(finding.rule),
            ", ".join(f"{name}={value:g}" for name, value in finding.parameters.items()),
        ]
        for finding in findings
    ]
    columns = [
        "rule",
        "",
        "violations",
        "datapoints",
        "seen",
        "change",
        "could save",
        "about",
        "parameters",
    ]
    return Section("Rules", tables=[Table(columns, rows)])


def measuring_section(run: RunData) -> Section | None:
    """Returns how the measuring was done, and what it cost."""
    if not run.matrix.ranks:
        return None
    rows = []
    for rank in run.matrix.ranks[:64]:
        one = describe_rank(run.folder.profiler_dir, rank)
        offset, error = one.get("clock_offset_seconds"), one.get("clock_error_seconds")
        rows.append(
            [
                rank,
                one.get("hostname"),
                1000 * offset if offset is not None else None,
                1000 * error if error is not None else None,
            ]
        )
    costs = [np.nanmean(t.of("profiler")) for t in run.system if t.of("profiler").size]
    text = f"Sampling took {max(costs):.2f}% of a core on the busiest host." if costs else ""
    columns = ["rank", "host", "clock ahead of rank 0's, ms", "at most wrong by, ms"]
    return Section("Measuring", [text], [Table(columns, rows)])


def write_rule_files(run: RunData, document: Document) -> Path:
    """Writes one JSON file a rule, as SageMaker's report does; returns their folder."""
    folder = run.folder.profiler_dir / "rules"
    folder.mkdir(parents=True, exist_ok=True)
    for finding in document.numbers["rules"]:
        path = folder / f"{finding['RuleName']}.json"
        options = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY
        path.write_bytes(orjson.dumps(finding, option=options))
    return folder
