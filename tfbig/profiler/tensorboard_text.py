"""What a run is and what was seen in it, as TensorBoard's text; its users need nothing of ours."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfbig.config import Config, to_dict
from tfbig.loop import Hook, Progress
from tfbig.profiler.energy import energy_of
from tfbig.profiler.energy_assumptions import Assumptions
from tfbig.profiler.goodput import ledger_of
from tfbig.profiler.rules.catalogue import look_at
from tfbig.profiler.rules.rule import Finding
from tfbig.profiler.run_data import read_run
from tfbig.profiler.summary import summarise, verdict_of


def config_text(config: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns a configuration as a Markdown table."""
    rows = [
        f"| {section} | {name} | {_cell(value)} |"
        for section, fields in config.items()
        for name, value in fields.items()
    ]
    return "\n".join(["| section | option | value |", "|---|---|---|", *rows])


def rules_text(findings: Sequence[Finding]) -> str:
    """Returns the rules that fired as a Markdown table."""
    rows = [
        f"| {one.rule} | {_cell(one.evidence)} | {_cell(one.change)} | {_cell(one.expected)} |"
        for one in findings
        if one.triggered
    ]
    if not rows:
        return "No rule fired."
    return "\n".join(["| rule | seen | change | could save |", "|---|---|---|---|", *rows])


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


class TensorBoardTextHook(Hook):
    """Writes the configuration at the start; the verdict and the rules that fired at the end.

    Args:
      folder: of the run.
      board: folder of TensorBoard's files.
      config: of the run.
    """

    def __init__(self, folder: Path, board: Path, config: Config) -> None:
        import tensorflow as tf

        self._folder, self._config = folder, config
        self._summary = tf.summary
        self._writer = tf.summary.create_file_writer(str(board))

    def on_start(self, progress: Progress, resumed: bool) -> None:
        self._write("run/config", config_text(to_dict(self._config)), progress.step)

    def on_stop(self, progress: Progress, reason: str) -> None:
        try:
            run = read_run(self._folder)
            ledger, findings = ledger_of(run), look_at(run)
            numbers = summarise(run, ledger, energy_of(run, Assumptions()))
            verdict = verdict_of(run, numbers, ledger, findings)
        except Exception as error:  # the run is trained and saved: no text is worth its failure
            print(f"warning: no verdict for TensorBoard: {error}", file=sys.stderr, flush=True)
        else:
            lines = [f"{number}. {text}" for number, text in enumerate(verdict, 1)]
            self._write("run/verdict", "\n".join(lines), progress.step)
            self._write("run/rules", rules_text(findings), progress.step)
        self._writer.close()

    def _write(self, name: str, text: str, step: int) -> None:
        with self._writer.as_default(step=step):
            self._summary.text(name, text)
