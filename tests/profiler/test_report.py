"""Reports: of a real run, of spoilt ones, of several; as a page, as text, and live."""

import json
import re
import subprocess
import sys
import threading
import urllib.request

import pytest

from benchmarks.synthetic_run import SyntheticRun
from tests.distributed.launch import REPOSITORY, environment
from tests.profiler.test_rules import tensors
from tfbig import report
from tfbig.errors import UserError
from tfbig.profiler.energy import energy_of
from tfbig.profiler.energy_assumptions import Assumptions
from tfbig.profiler.goodput import PARTS, ledger_of
from tfbig.profiler.run_data import read_run
from tfbig.profiler.similar_runs import similarity
from tfbig.profiler.watch import ReportServer
from tfbig.report import ReportConfig
from tfbig.run_folder import read_events

BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("tensorflow", "keras", "horovod"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
from tfbig import report
report.main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory):
    """A run on 4 ranks that waits for data, with a slow rank."""
    run = SyntheticRun(num_ranks=4, num_gpus=1)
    for host in run.system:
        for core in range(4):
            host["cpu", "CPUUtilization", f"cpu{core}"][:] = 30
    run.data_wait[:] = 0.25 * run.seconds
    run.communication[:] = 0.3 * run.seconds
    run.communication[2] = 0.02 * run.seconds
    return run.write(tmp_path_factory.mktemp("runs") / "spoilt")


def test_the_page_needs_nothing_else(measured_run):
    page = report.run(ReportConfig(), [str(measured_run)])
    start = page.index("</script>")  # behind plotly, whose code names addresses
    assert not re.search(r'(src|href)="(?!#|data:)', page[start:])
    assert page.count('class="plotly-graph-div"') >= 9
    assert "<th>could save</th>" in page
    for title in ("Learning", "A step&#x27;s time", "Goodput", "Hosts", "Sources", "Rules"):
        assert f"<h2>{title}</h2>" in page
    assert page.index('<ol class="verdict">') < page.index("<h2>")
    assert "<td>even</td>" in page and "<td>odd</td>" in page, "sources by name"


def test_json_has_the_numbers(measured_run):
    found = json.loads(report.run(ReportConfig(format="json"), [str(measured_run)]))
    assert found["steps"] == 30 and found["starts"] == 2
    assert sum(found["split_shares"].values()) == pytest.approx(1)
    assert sum(found["ledger_seconds"].values()) == pytest.approx(found["wall_seconds"], rel=0.02)
    rules = json.loads((measured_run / "profiler-output/rules/StepOutlier.json").read_text())
    assert rules["RuleTriggered"] == 0 and rules["RuleParameters"]["stddev"] == 3
    assert found["joules"] > 0 and found["validation_loss"] > 0


def test_the_verdict_comes_first_and_names_what_to_change(spoilt):
    text = report.run(ReportConfig(format="md"), [str(spoilt)])
    verdict = text.partition("## ")[0]
    assert "300 steps" in verdict and "Straggler: rank 2 on host-1" in verdict
    assert "--data_workers=4" in verdict and "It could save up to 25%" in verdict


def test_the_report_needs_no_tensorflow(spoilt, tmp_path):
    command = [sys.executable, "-c", BLOCKED, str(spoilt), f"--to={tmp_path / 'page.html'}"]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "page.html").stat().st_size > 1e6


def test_runs_are_compared(spoilt, tmp_path):
    healthy = SyntheticRun(num_ranks=4, num_gpus=1, config={"data_workers": 4})
    healthy.seconds *= 0.7
    other = healthy.write(tmp_path / "healthy")
    found = json.loads(report.run(ReportConfig(format="json"), [str(spoilt), str(other)]))
    assert found["options"] == [{"option": "data.data_workers", "spoilt": "1", "healthy": "4"}]
    beyond = {row["number"]: row["beyond noise"] for row in found["comparisons"]}
    assert beyond["seconds of a step"] and not beyond["gradient norm"]
    assert any("better, beyond noise" in line for line in found["verdict"])
    same = json.loads(report.run(ReportConfig(format="json"), [str(spoilt), str(spoilt)]))
    assert any("bit by bit" in line for line in same["verdict"])
    assert not any(row["beyond noise"] for row in same["comparisons"])
    page = report.run(ReportConfig(), [str(spoilt), str(other)])
    assert "Runs compared" in page


def test_a_comparison_counts_what_it_names(tmp_path):
    """Only the gradient norm differs, of which neither direction is better."""
    first, second = SyntheticRun(), SyntheticRun()
    second.grad_norm *= 2
    paths = [str(run.write(tmp_path / n)) for run, n in ((first, "first"), (second, "second"))]
    heading, *lines = json.loads(report.run(ReportConfig(format="json"), paths))["verdict"]
    assert heading == "No option differs; 1 of 6 compared numbers differ beyond noise."
    assert [line.split(" +")[0] for line in lines if "beyond noise" in line] == [
        "second: gradient norm"
    ]


def test_tensors_are_compared_across_runs(tmp_path):
    first, second = SyntheticRun(), SyntheticRun()
    first.tensors, second.tensors = tensors(), tensors(std=0.3)
    paths = [first.write(tmp_path / "first"), second.write(tmp_path / "second")]
    runs = [read_run(path) for path in paths]
    assert similarity(runs[0], runs[0]) == (
        "SimilarAcrossRuns: 4 tensors are alike at every step looked at."
    )
    lines = json.loads(report.run(ReportConfig(format="json"), list(map(str, paths))))["verdict"]
    assert (
        "second: SimilarAcrossRuns: 2 of 4 tensors differ, first at step 1:"
        " transformer_blocks/1/att/qkv/kernel."
    ) in lines


def test_the_end_of_a_run_is_in_the_ledger(tmp_path):
    """The last step ended 1 s before the run did; with a stop 30 s later 30 s are finalisation."""
    path = SyntheticRun(num_steps=60).write(tmp_path / "run")
    *events, stop = map(json.loads, (path / "events.jsonl").read_text().splitlines())
    assert ledger_of(read_run(path)).seconds["finalisation"] == pytest.approx(1)
    events.append({"event": "evaluation", "time": stop["time"] + 5, "seconds": 4.0})
    events.append({**stop, "time": stop["time"] + 29})
    (path / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    ledger = ledger_of(read_run(path))
    assert ledger.seconds["finalisation"] == pytest.approx(26)
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.total)


def test_a_checkpoint_written_beside_training_counts_once(tmp_path, measured_run):
    """Of 50 s of saving training stood still for 3; the rest lies in the steps' time already."""
    path = SyntheticRun(num_steps=60).write(tmp_path / "run")
    before = ledger_of(read_run(path))
    begun = json.loads((path / "events.jsonl").read_text().splitlines()[0])["time"]
    saved = {"event": "checkpoint", "time": begun + 70, "seconds": 50.0, "wait_seconds": 3.0}
    with open(path / "events.jsonl", "a") as file:
        file.write(json.dumps(saved) + "\n")
    after = ledger_of(read_run(path))
    assert (
        after.seconds["checkpoint"] == 3
        and after.seconds["training"] == (before.seconds["training"])
    )
    real = [event for event in read_events(measured_run) if event["event"] == "checkpoint"]
    assert real and all(0 < event["wait_seconds"] for event in real)


def test_the_ledger_counts_lost_steps_and_idle_time(tmp_path):
    """Killed after step 8, resumed 100 s later from step 6."""
    path = SyntheticRun(num_steps=8, step_seconds=1.0).write(tmp_path / "run")
    lines = (path / "metrics.jsonl").read_text().splitlines()
    events = (path / "events.jsonl").read_text().splitlines()[:-1]  # no stop
    last = json.loads(lines[-1])["time"]
    begin = last + 100
    events.append(
        json.dumps({"event": "start", "process_start": begin, "time": begin + 10, "reason": ""})
    )
    for number, line in enumerate(lines[6:]):
        again = json.loads(line) | {"time": begin + 11 + number}
        lines.append(json.dumps(again))
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (path / "events.jsonl").write_text("\n".join(events) + "\n")
    ledger = ledger_of(read_run(path))
    assert ledger.num_sessions == 2 and ledger.num_lost_steps == 2
    assert ledger.seconds["idle"] == pytest.approx(100) and set(ledger.seconds) == set(PARTS)
    assert ledger.seconds["lost steps"] == pytest.approx(2, rel=0.1)
    assert ledger.seconds["initialisation"] == pytest.approx(15)
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.total, rel=0.01)


def test_energy_by_hand(tmp_path):
    """One host, 600 s: four cores at 30%, one GPU at 270 W, 64 GB."""
    run = SyntheticRun(num_gpus=1)
    host = run.system[0]
    for core in range(4):
        host["cpu", "CPUUtilization", f"cpu{core}"][:] = 30
    host["gpu", "PowerWatts", "gpu0"][:] = 270
    data = read_run(run.write(tmp_path / "run"))
    energy = energy_of(data, Assumptions(10, 0.5, 1.0, 0.4))
    seconds = data.system[0].times[-1] - data.system[0].times[0]
    assert energy.gpu == pytest.approx(270 * seconds, rel=1e-3)
    assert energy.cpu == pytest.approx(4 * 0.3 * 10 * seconds, rel=1e-3)
    assert energy.memory == pytest.approx(0.5 * 64 * seconds, rel=1e-3)
    assert energy.kilograms == pytest.approx(energy.joules / 3.6e6 * 0.4)


def test_a_live_report(spoilt):
    config = ReportConfig(watch=True, refresh_seconds=7)
    server = ReportServer(lambda: report.run(config, [str(spoilt)]), 0, 60)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        with urllib.request.urlopen(server.url, timeout=60) as answer:
            page = answer.read().decode()
        assert '<meta http-equiv="refresh" content="7">' in page and "Straggler" in page
        with pytest.raises(UserError, match="--port"):
            ReportServer(lambda: "", int(server.url.split(":")[2].strip("/")), 1)
    finally:
        server.stop()
        thread.join(10)


def test_a_live_report_of_a_run_without_records_loads_itself_anew(tmp_path):
    config = ReportConfig(watch=True, refresh_seconds=7)
    server = ReportServer(lambda: report.run(config, [str(tmp_path)]), 0, 7)
    try:
        page = server.page().decode()
    finally:
        server._server.server_close()
    assert '<meta http-equiv="refresh" content="7">' in page and "config.json" in page


def test_mistakes_are_one_line(tmp_path, spoilt):
    for arguments, words in {
        (): "name a run's folder",
        (str(tmp_path),): "config.json",
        (str(spoilt), "--rule_parameter=x"): "StepOutlier_stddev=5",
        (str(spoilt), "--rule_parameter=Nothing_x=1"): "no rule 'Nothing'",
        (str(spoilt), "--watch", "--format=md"): "--watch serves HTML",
        (str(spoilt), f"--to={tmp_path}/none/page.html"): "choose another --to",
    }.items():
        with pytest.raises(UserError, match=re.escape(words)) as error:
            report._body(arguments)
        assert "\n" not in str(error.value)


def test_a_run_that_has_just_begun_has_a_report(tmp_path):
    path = SyntheticRun(num_steps=3).write(tmp_path / "run")
    for name in ("metrics.jsonl", "events.jsonl"):
        (path / name).unlink()
    for file in sorted((path / "profiler-output").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    page = report.run(ReportConfig(), [str(path)])
    assert "No step is recorded yet" in page and "No host was sampled" in page
