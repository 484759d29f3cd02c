"""A page about a run, or several compared: `tfbig report RUN`, `tfbig report RUN1 RUN2`."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tfbig.command import run_command
from tfbig.errors import UserError
from tfbig.flags import Flags
from tfbig.profiler.energy_assumptions import Assumptions

ASSUMED = Assumptions()


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """What to report, and how."""

    run: str = ""
    """Run folder; runs can also be given as words, several to compare them with the first."""
    format: Literal["html", "md", "json"] = "html"
    """html is one self-contained page with figures; md and json go to the screen."""
    to: str = ""
    """File to write; empty means RUN/report.html (comparison.html), or the screen."""
    watch: bool = False
    """Serves the page on this machine and renews it while training goes on."""
    port: int = 8765
    """Port to serve on; 0 takes a free one."""
    refresh_seconds: int = 15
    """Seconds between two looks of --watch."""
    rule_parameter: tuple[str, ...] = ()
    """RULE_PARAMETER=VALUE, e.g. IOBottleneck_gpu_threshold=70. Repeat the flag for more."""
    watts_per_core: float = ASSUMED.watts_per_core
    """Power of a core in full use, where no counter is readable."""
    watts_per_gigabyte: float = ASSUMED.watts_per_gigabyte
    """Power of a GB of memory."""
    overhead: float = ASSUMED.overhead
    """Energy of the data centre over that of its computers (PUE)."""
    kilograms_per_kwh: float = ASSUMED.kilograms_per_kwh
    """CO2 of the grid; the default is about the world's mean."""


def run(config: ReportConfig, runs: Sequence[str]) -> str:
    """Returns the report in its format.

    Args:
      config: how.
      runs: folders; several are compared with the first.

    Raises:
      UserError: one is no run's folder, or a parameter is unknown.
    """
    from tfbig.profiler.report_html import to_html
    from tfbig.profiler.report_text import to_json, to_markdown

    document = _document(config, runs)
    if config.format == "md":
        return to_markdown(document)
    if config.format == "json":
        return to_json(document)
    return to_html(document, config.refresh_seconds if config.watch else 0)


def _document(config: ReportConfig, runs: Sequence[str]) -> Any:
    from tfbig.profiler.comparison import compare
    from tfbig.profiler.report_sections import report_of, write_rule_files
    from tfbig.profiler.run_data import read_run

    if len(runs) > 1:
        return compare([read_run(path) for path in runs])
    # A page that is renewed is of a run in training: silence counts up to now.
    data = read_run(runs[0], time.time() if config.watch else None)
    assumptions = Assumptions(
        config.watts_per_core, config.watts_per_gigabyte, config.overhead, config.kilograms_per_kwh
    )
    document = report_of(data, assumptions, _settings(config.rule_parameter))
    if not config.watch:
        write_rule_files(data, document)
    return document


def _settings(texts: Sequence[str]) -> dict[str, str]:
    settings = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--rule_parameter={text}: write e.g. StepOutlier_stddev=5.")
        settings[name] = value
    return settings


def _watch(config: ReportConfig, runs: Sequence[str]) -> None:
    from tfbig.profiler.watch import ReportServer

    server = ReportServer(lambda: run(config, runs), config.port, config.refresh_seconds)
    print(f"{server.url} shows {', '.join(runs)}; end with Ctrl-C", flush=True)
    server.serve()


def _body(arguments: Sequence[str]) -> None:
    flags = Flags("report", (ReportConfig,), "a page about a run, or several compared.")
    given = flags.parse(arguments, positional=True)
    words = given.pop("arguments")
    config = ReportConfig(**given)
    runs = [*([config.run] if config.run else []), *words]
    if not runs:
        raise UserError("name a run's folder: tfbig report runs/gpt_tiny.")
    if config.watch:
        if config.format != "html" or config.to:
            raise UserError("--watch serves HTML: leave --format and --to out.")
        return _watch(config, runs)
    text = run(config, runs)
    if config.format != "html" and not config.to:
        print(text, end="")
        return
    name = "report.html" if len(runs) == 1 else "comparison.html"
    _write(Path(config.to) if config.to else Path(runs[-1]) / name, text)


def _write(path: Path, text: str) -> None:
    from tfbig.durable_file import write_atomic

    try:
        write_atomic(path, text.encode())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another --to.") from error
    print(f"{path} ({len(text) / 1e6:.1f} MB)")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits."""
    run_command("report", _body, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    main()
