"""One long run that meets a failure every so many steps: do memory and descriptors stay flat?

`python -m benchmarks.soak --steps=10000 --failure_every=200` runs it, under `tfbig launch`, which
starts it again after what it cannot survive.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks import soak_runs
from benchmarks.failing_run import FAILURES
from tfbig.checkpoint import list_checkpoints
from tfbig.checkpoint_reader import CheckpointReader
from tfbig.run_folder import read_events, read_metrics

SECONDS_BETWEEN = 0.5
# A process takes its memory over its first 600 steps, whether anything befalls it or not. What it
# holds after so many records is held against what it has at the end.
WARM_RECORDS, LEAST_SAMPLES = 700, 12
MEMORY_BAR, DESCRIPTORS_BAR = 0.05, 2


class Sample(NamedTuple):
    """What a process holds."""

    records: int  # that the run has written by then
    resident: int  # bytes
    descriptors: int


class Growth(NamedTuple):
    """What a process holds late in its life beyond what it held early."""

    name: str
    seconds: float
    early: Sample
    late: Sample

    @property
    def memory(self) -> float:
        """Share of the early memory."""
        return self.late.resident / self.early.resident - 1

    @property
    def descriptors(self) -> int:
        """How many more are open."""
        return self.late.descriptors - self.early.descriptors


def growth_of(name: str, samples: list[Sample]) -> Growth | None:
    """Returns how much a process grew; None where it lived too short for that.

    Args:
      name: of the process.
      samples: over its life, SECONDS_BETWEEN apart.
    """
    begin = samples[0].records + WARM_RECORDS
    warm = [sample for sample in samples if sample.records >= begin]
    if len(warm) < LEAST_SAMPLES:
        return None
    part = len(warm) // 4

    def middle(chosen: list[Sample]) -> Sample:
        return Sample(*(int(statistics.median(values)) for values in zip(*chosen, strict=True)))

    return Growth(name, SECONDS_BETWEEN * len(warm), middle(warm[:part]), middle(warm[-part:]))


def sample(pid: int, records: int) -> Sample | None:
    """Returns what a process holds; None when it has ended."""
    try:
        process = psutil.Process(pid)
        return Sample(records, process.memory_info().rss, process.num_fds())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def rank_of(pid: int) -> str:
    """Returns a process's rank, "" when it has ended."""
    try:
        return psutil.Process(pid).environ().get("HOROVOD_RANK", "0")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


def command_of(folder: Path, flags: list[str], steps: int, every: int, num_ranks: int) -> list[str]:
    """Returns the command of the run, with what starts it again."""
    periods = (max(1, every // 4), 5 * every // 2)  # of checkpoints and evaluations
    run = soak_runs.command_of(flags, folder / "run", steps, num_ranks, *periods)
    at = run.index("-m")
    worker = str(Path(__file__).with_name("failing_run.py"))
    run[at : at + 2] = [worker, str(folder / "failures"), str(every)]
    run += ["--bad_step_policy=rollback", "--log_every=1000"]
    launch = [sys.executable, "-m", "tfbig.launch", "--restarts=1000", "--restart_wait=0"]
    return [*launch, "--", *run]


def watch(process: subprocess.Popen, run_dir: Path) -> dict[str, list[Sample]]:
    """Returns samples of the launcher and of each rank's processes until the run ends."""
    samples: dict[str, list[Sample]] = {}
    names: dict[int, str] = {process.pid: "tfbig launch"}
    lives: Counter = Counter()
    looked, records, metrics = 0.0, 0, run_dir / "metrics.jsonl"
    read = 0
    while process.poll() is None:
        if time.monotonic() - looked > 2:
            looked = time.monotonic()
            for pid in soak_runs.ranks_of(run_dir):
                if pid not in names and (rank := rank_of(pid)):
                    lives[rank] += 1
                    names[pid] = f"rank {rank}, start {lives[rank]}"
        if metrics.exists():
            with open(metrics, "rb") as file:
                file.seek(read)
                text = file.read()
            read, records = read + len(text), records + text.count(b"\n")
        for pid, name in list(names.items()):
            if (found := sample(pid, records)) is None:
                del names[pid]
            else:
                samples.setdefault(name, []).append(found)
        time.sleep(SECONDS_BETWEEN)
    return samples


def problems_of(run_dir: Path, steps: int, every: int) -> list[str]:
    """Returns in what a finished run is not as it should be."""
    problems = []
    found = [record["step"] for record in read_metrics(run_dir)]
    if found != list(range(1, steps + 1)):
        problems.append(f"the run has {len(found)} of {steps} steps")
    events = Counter(event["event"] for event in read_events(run_dir))
    due = Counter(FAILURES[number % len(FAILURES)] for number in range(steps // every))
    if events["rollback"] != due["bad"]:
        problems.append(f"{events['rollback']} rollbacks instead of {due['bad']}")
    starts = 1 + due["kill"] + due["raise"]
    if events["start"] != starts:
        problems.append(f"{events['start']} starts instead of {starts}")
    for info in list_checkpoints(run_dir / "checkpoints"):
        problems += CheckpointReader(info.path).problems()
    problems += [f"process {pid} is left" for pid in soak_runs.processes_of(run_dir)]
    return problems


def endure(
    folder: Path, flags: list[str], steps: int, every: int, num_ranks: int
) -> tuple[list[Growth], list[str]]:
    """Runs; returns how much each process grew, and what went wrong.

    Args:
      folder: for everything.
      flags: of model and data.
      steps: of the run.
      every: steps from one failure to the next.
      num_ranks: processes of the run.
    """
    run_dir = folder / "run"
    process = soak_runs.start(command_of(folder, flags, steps, every, num_ranks), folder / "log")
    try:
        samples = watch(process, run_dir)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=60)
    if process.returncode:
        return [], [f"code {process.returncode}: " + (folder / "log").read_text()[-3000:]]
    grown = [growth_of(name, own) for name, own in samples.items()]
    return [growth for growth in grown if growth], problems_of(run_dir, steps, every)


def report(parent: str | None, steps: int, every: int, num_ranks: int) -> None:
    """Runs in a temporary folder and prints what the processes held, then the bars."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=parent) as name:
        folder = Path(name)
        grown, problems = endure(folder, soak_runs.make_data(folder), steps, every, num_ranks)
    for growth in grown:
        early, late = growth.early, growth.late
        print(
            f"{growth.name}: {growth.seconds:.0f} s, {early.resident / 2**20:.1f} MiB to "
            f"{late.resident / 2**20:.1f} ({growth.memory:+.1%}), {early.descriptors} descriptors "
            f"to {late.descriptors}"
        )
    print(json.dumps(problems[:20]) if problems else "no problem", flush=True)
    title = f"{steps} steps, a failure every {every}, {num_ranks} ranks"
    met = "no" if problems else "yes"
    seconds = time.perf_counter() - begin
    print(f"{title}: finishes | no problem | {len(problems)} problems, {seconds:.0f} s | {met}")
    if not grown:
        print(f"{title}: memory and descriptors | flat | no process lived long enough | skipped")
        return
    memory = max(growth.memory for growth in grown)
    descriptors = max(growth.descriptors for growth in grown)
    met = "yes" if memory <= MEMORY_BAR else "no"
    print(f"{title}: growth of a process's memory | <= {MEMORY_BAR:.0%} | {memory:.1%} | {met}")
    met = "yes" if descriptors <= DESCRIPTORS_BAR else "no"
    print(f"{title}: growth of open files | <= {DESCRIPTORS_BAR} | {descriptors} | {met}")
