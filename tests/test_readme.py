"""The commands in README.md and docs/ run as they are written."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.distributed.launch import REPOSITORY, run

BLOCK = re.compile(r"^```sh([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def commands(page: Path, to_run: bool) -> list[str]:
    """Returns the commands of a page's sh blocks; `no-run: reason` after ```sh marks the others."""
    found = []
    for mark, body in BLOCK.findall(page.read_text()):
        assert not mark.strip() or re.match(r" no-run: \w", mark), f"{page}: ```sh{mark}"
        if (not mark.strip()) is to_run:
            found += [line for line in body.splitlines() if line and not line.startswith("#")]
    return found


def inline_commands(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]*python -m tfbig\.[^`\n]*)`", page.read_text())


@pytest.mark.distributed
def test_commands_run_as_written(tmp_path):
    environment = {"PYTHONPATH": str(REPOSITORY)}
    for page in PAGES:
        for command in commands(page, to_run=True):
            done = run(["bash", "-c", f"cd {tmp_path} && {command}"], 600, environment)
            assert done.returncode == 0, f"{command}\n{done.stdout}"


def test_flags_of_all_commands_exist():
    import importlib

    pattern = re.compile(r"tfbig\.(\w+)|^tfbig (\w+)")
    checked = 0
    for page in PAGES:
        lines = [*commands(page, False), *commands(page, True), *inline_commands(page)]
        for command in (part for line in lines for part in line.split(" -- ")):
            words = shlex.split(command)
            names = [m.group(1) or m.group(2) for m in pattern.finditer(command)]
            flags = [word for word in words if word.startswith("--")]
            if not names or not flags:
                continue
            module = importlib.import_module(f"tfbig.{names[0]}")
            text = help_of(module.__name__)
            for flag in flags:
                name = flag[2:].partition("=")[0]
                assert f"--{name}:" in text, f"{page.name}: {command}: no flag --{name}"
                checked += 1
    assert checked > 5


def help_of(module: str) -> str:
    done = run([sys.executable, "-m", module, "--helpfull"], 60, {"PATH": os.environ["PATH"]})
    assert done.returncode == 0, done.stdout
    return done.stdout
