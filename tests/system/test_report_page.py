"""The report's page in a real browser; only under `make test-system`, which sees to the browser."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.synthetic_run import SyntheticRun
from tfbig import report
from tfbig.report import ReportConfig

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not os.environ.get("TFBIG_SYSTEM_TESTS"), reason="make test-system runs it"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    run = SyntheticRun(num_steps=200, num_ranks=4, num_gpus=2, step_seconds=0.5)
    run.evaluations = [(100, 4.0, 1.0), (200, 3.5, 1.0)]
    split = {"forward": 0.2, "backward": 0.25, "launch and idle": 0.05}
    run.captures = [
        {
            "step": 5,
            "rank": 0,
            "wall_seconds": 0.5,
            "split": split,
            "hidden_communication": 0.05,
            "operators": [{"type": "MatMul", "phase": "forward", "count": 3, "seconds": 0.1}],
        }
    ]
    path = folder / "report.html"
    path.write_text(report.run(ReportConfig(), [str(run.write(folder / "run"))]))
    return path


def browse(page: Path, *options: str) -> subprocess.CompletedProcess:
    """Opens a page without a window; returns what the browser printed."""
    assert BROWSER, "install one: apt-get install chromium"
    command = [
        BROWSER,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--disable-component-update",
        "--no-first-run",
        f"--user-data-dir={page.parent / 'profile'}",
        "--enable-logging=stderr",
        "--window-size=1150,9500",
        "--virtual-time-budget=30000",
        *options,
        page.as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


def test_charts_are_drawn_without_an_error_or_a_request(page):
    log = page.parent / "net.json"
    done = browse(page, "--dump-dom", f"--log-net-log={log}")
    assert done.returncode == 0, done.stderr
    charts = done.stdout.count("plotly-graph-div")
    drawn = len(re.findall(r'<svg[^>]*class="main-svg"[^>]*>', done.stdout))
    assert charts >= 10 and drawn >= charts, f"{drawn} drawings of {charts} charts"
    assert done.stdout.count('class="trace') > 10 or done.stdout.count("scatterlayer") > 5
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not console, console
    text = log.read_text()
    addresses = set(re.findall(r'"url":"((?:https?|wss?)://[^"]*)"', text))
    initiated = [a for a in addresses if json.dumps(a)[1:-1] in page.read_text()]
    assert not initiated, initiated


def test_a_screenshot_has_colours(page, tmp_path):
    shot = tmp_path / "shot.png"
    done = browse(page, f"--screenshot={shot}", "--hide-scrollbars")
    assert done.returncode == 0 and shot.stat().st_size > 100_000, done.stderr
