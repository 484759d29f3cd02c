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


def undrawn(document: str) -> list[str]:
    """Returns the charts of a page without a drawing, or with no mark in it."""
    parts = re.split(r'<div[^>]*\bid="(figure-\d+)"', document)[1:]
    charts = dict(zip(parts[::2], parts[1::2], strict=True))
    assert len(charts) == document.count('class="plotly-graph-div') >= 10
    marks = r'class="(?:trace |point|box|js-line|bars)|<image '
    return [n for n, text in charts.items() if "main-svg" not in text or not re.search(marks, text)]


def requests_of(log: Path) -> set[str]:
    """Returns the addresses that a page, and not the browser by itself, asked for."""
    found = set()
    for event in json.loads(log.read_text())["events"]:
        parameters = event.get("params", {})
        url, initiator = str(parameters.get("url", "")), parameters.get("initiator")
        if url.startswith(("http", "ws")) and initiator not in (None, "not an origin"):
            found.add(url)
    return found


def test_charts_are_drawn_without_an_error_or_a_request(page):
    log = page.parent / "net.json"
    done = browse(page, "--dump-dom", f"--log-net-log={log}")
    assert done.returncode == 0, done.stderr
    assert undrawn(done.stdout) == []
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not console, console
    assert requests_of(log) == set()


def test_a_request_and_an_empty_chart_would_be_seen(page, tmp_path):
    """The same page with a picture from elsewhere, without its policy, and with a chart undone."""
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text())
    spoilt = tmp_path / "page.html"
    script = "window.addEventListener('load', () => Plotly.purge('figure-2'))"
    tail = f"<img src='http://127.0.0.1:9/asked.png'><script>{script}</script></body>"
    spoilt.write_text(text.replace("</body>", tail))
    log = tmp_path / "net.json"
    done = browse(spoilt, "--dump-dom", f"--log-net-log={log}")
    assert undrawn(done.stdout) == ["figure-2"]
    assert requests_of(log) == {"http://127.0.0.1:9/asked.png"}


def test_a_screenshot_has_colours(page, tmp_path):
    shot = tmp_path / "shot.png"
    done = browse(page, f"--screenshot={shot}", "--hide-scrollbars")
    assert done.returncode == 0 and shot.stat().st_size > 100_000, done.stderr
