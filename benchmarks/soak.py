"""Kills a random rank of a training run again and again, and compares it with one left alone.

usage: python -m benchmarks.soak [--quick] [--kills 100] [--ranks 2] [--folder FOLDER]
       python -m benchmarks.soak --steps 10000 --failure_every 200 [--quick] [--ranks 2]

Each kill is a SIGKILL at a moment drawn at random: during start-up, at any step, while a checkpoint
is being written, or in an evaluation. What it really hit is read from the folder afterwards, and
the moment that lags most behind its weight is sought next. The same command then goes on. In the
end the losses of all steps must be those of the undisturbed run bit by bit (--deterministic), no
sample lost or repeated, every checkpoint readable, and no process left.

With --steps one run meets a failure every so many steps, which it survives or is started again
after, and the memory and file descriptors of its processes must stay flat: benchmarks/endurance.py.
"""

import argparse
import os
import random
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import orjson

from benchmarks import endurance
from benchmarks.soak_runs import (
    CHECKPOINT_EVERY,
    EVAL_EVERY,
    command_of,
    make_data,
    processes_of,
    ranks_of,
    start,
)
from tfbig.checkpoint import latest, list_checkpoints
from tfbig.checkpoint_reader import CheckpointReader
from tfbig.run_folder import read_events, read_metrics

WEIGHTS = {"start-up": 1, "step": 2, "checkpoint": 2, "evaluation": 1}
START_SECONDS = 900.0  # a loaded machine
COMPARED = ("loss", "grad_norm", "learning_rate", "consumed_samples")


class Outcome(NamedTuple):
    """What a soak has shown."""

    kills: Counter  # by moment
    problems: list[str]


class Records:
    """What one start of a run has appended to its metrics.

    Args:
      run_dir: the run's folder; what stands in its metrics now is of earlier starts.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "metrics.jsonl"
        self._begin = self._path.stat().st_size if self._path.exists() else 0

    def newest(self) -> tuple[int, bool]:
        """Returns the newest step, 0 before the first, and whether its evaluation is there."""
        if not self._path.exists():
            return 0, False
        with open(self._path, "rb") as file:
            file.seek(max(self._begin, self._path.stat().st_size - 8192))
            lines = file.read().split(b"\n")[:-1]
        evaluated = False
        for line in reversed(lines):
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError:  # the middle of a line
                continue
            if record["kind"] == "train":
                return record["step"], evaluated
            evaluated = True
        return 0, False


class Assassin:
    """Kills a rank of one start of a run at a moment.

    Args:
      run_dir: the run's folder.
      process: the run, started just now.
      num_ranks: its processes.
      generator: of random numbers.
      start_up: seconds that an undisturbed start took to its first record.
    """

    def __init__(
        self,
        run_dir: Path,
        process: subprocess.Popen,
        num_ranks: int,
        generator: random.Random,
        start_up: float,
    ) -> None:
        self._run_dir, self._process, self._num_ranks = run_dir, process, num_ranks
        self._generator, self._start_up = generator, start_up
        self._checkpoints = run_dir / "checkpoints"
        newest = latest(self._checkpoints)
        self._resumed = 0 if newest is None else newest.step
        self._records = Records(run_dir)
        self._deadline = time.monotonic() + START_SECONDS

    def kill_at(self, moment: str) -> str:
        """Waits for a moment and kills a random rank.

        Returns:
          "killed", or "ended" when the run was over before.
        """
        ranks: list[int] = []

        def are_there() -> bool:
            ranks[:] = ranks_of(self._run_dir)
            return len(ranks) >= self._num_ranks

        # Known beforehand: a moment may be shorter than finding them takes.
        arrived = self._wait_until(are_there, interval=0.2)
        if moment == "start-up":
            seconds = self._generator.uniform(0, self._start_up)
            arrived = arrived and not self._wait_until(lambda: False, seconds)
        else:
            arrived = arrived and self._wait_for(moment)
        if not arrived or not ranks or self._process.poll() is not None:
            return "ended"
        try:
            os.kill(self._generator.choice(ranks), signal.SIGKILL)
        except ProcessLookupError:
            return "ended"
        return "killed"

    def _wait_for(self, moment: str) -> bool:
        if moment == "evaluation":  # it follows on the record of the step at which it is due
            due = (self._resumed // EVAL_EVERY + 1) * EVAL_EVERY
            return self._wait_until(lambda: self._records.newest()[0] >= due)
        step = self._resumed + self._generator.randint(1, 2 * CHECKPOINT_EVERY)
        arrived = self._wait_until(lambda: self._records.newest()[0] >= step)
        if moment == "checkpoint":
            return arrived and self._wait_until(self._unfinished)
        return arrived

    def hit(self) -> str:
        """Returns what the kill has hit; asked when the job has ended."""
        step, evaluated = self._records.newest()
        if not step:
            return "start-up"
        if self._unfinished():
            return "checkpoint"
        is_due = step % EVAL_EVERY == 0 and not evaluated
        return "evaluation" if is_due else "step"

    def _wait_until(
        self,
        condition: Callable[[], bool],
        patience: float = START_SECONDS,
        interval: float = 0.001,
    ) -> bool:
        deadline = min(self._deadline, time.monotonic() + patience)
        while self._process.poll() is None and time.monotonic() < deadline:
            if condition():
                return True
            time.sleep(interval)
        return False

    def _unfinished(self) -> bool:
        """Returns whether a checkpoint of this start is begun and has no manifest yet."""
        for path in self._checkpoints.glob("step_*"):
            step = path.name.removeprefix("step_")
            if step.isdigit() and int(step) > self._resumed:
                if not (path / "manifest.json").exists():
                    return True
        return False


def moment_to_seek(kills: Counter) -> str:
    """Returns the moment that lags most behind its weight.

    >>> moment_to_seek(Counter({"step": 2, "checkpoint": 1, "start-up": 1, "evaluation": 1}))
    'checkpoint'
    """
    return min(WEIGHTS, key=lambda moment: kills[moment] / WEIGHTS[moment])


def problems_after_a_kill(run_dir: Path, process: subprocess.Popen) -> list[str]:
    """Waits until the job has gone; returns what is not as it should be."""
    problems = []
    try:
        process.wait(timeout=120)
    except subprocess.TimeoutExpired:
        problems.append("the job did not end within 120 s after the kill")
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + 30
    while processes_of(run_dir) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in processes_of(run_dir):
        problems.append(f"process {pid} is left")
        os.kill(pid, signal.SIGKILL)
    for info in list_checkpoints(run_dir / "checkpoints"):
        problems += CheckpointReader(info.path).problems()
    return problems


def differences(straight: Path, killed: Path, steps: int) -> list[str]:
    """Returns in what the metrics of two runs differ."""
    first, second = read_metrics(straight), read_metrics(killed)
    if [r["step"] for r in second] != list(range(1, steps + 1)):
        return [f"the killed run has {len(second)} of {steps} steps"]
    return [
        f"step {old['step']}: {name} {old[name]!r} became {new[name]!r}"
        for old, new in zip(first, second, strict=True)
        for name in COMPARED
        if old[name] != new[name]
    ]


def soak(folder: Path, num_kills: int, num_ranks: int, flags: list[str], seed: int = 0) -> Outcome:
    """Runs undisturbed, then with kills, and compares.

    Args:
      folder: empty, for everything.
      num_kills: kills to make; the run is long enough for them.
      num_ranks: processes of the run.
      flags: of model and data.
      seed: of the moments.
    """
    generator, steps = random.Random(seed), max(20, 15 * num_kills)
    straight, killed = folder / "straight", folder / "killed"
    first = start(command_of(flags, straight, steps, num_ranks), folder / "straight.log")
    code = first.wait(timeout=3600)
    assert code == 0, (folder / "straight.log").read_text()[-3000:]
    times = {event["event"]: event for event in reversed(read_events(straight))}
    start_up = times["first_step"]["time"] - times["start"]["process_start"]
    kills: Counter = Counter()
    problems: list[str] = []
    while kills.total() < num_kills and not problems:
        process = start(command_of(flags, killed, steps, num_ranks), folder / "killed.log")
        assassin = Assassin(killed, process, num_ranks, generator, start_up)
        outcome = assassin.kill_at(moment_to_seek(kills))
        problems += problems_after_a_kill(killed, process)
        if outcome == "ended":
            break
        kills[assassin.hit()] += 1
    if process.returncode != 0 and not problems:
        last = start(command_of(flags, killed, steps, num_ranks), folder / "killed.log")
        if last.wait(timeout=3600):
            problems.append(
                "the last resume failed: " + (folder / "killed.log").read_text()[-3000:]
            )
    return Outcome(kills, problems or differences(straight, killed, steps))


def main() -> None:
    """Prints what happened, then the bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder")
    parser.add_argument("--steps", type=int, help="of one long run with failures")
    parser.add_argument("--failure_every", type=int, default=200)
    given = parser.parse_args()
    if given.folder:
        Path(given.folder).mkdir(parents=True, exist_ok=True)
    if given.steps:
        steps, every = (60, 10) if given.quick else (given.steps, given.failure_every)
        endurance.report(given.folder, steps, every, given.ranks)
        return
    num_kills = 2 if given.quick else given.kills
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        begin = time.perf_counter()
        flags = make_data(Path(folder))
        outcome = soak(Path(folder), num_kills, given.ranks, flags)
    print(f"{dict(outcome.kills)} in {time.perf_counter() - begin:.0f} s")
    for problem in outcome.problems[:20]:
        print(problem)
    made = outcome.kills.total()
    passed = made == num_kills and not outcome.problems
    print(
        f"{num_kills} random kills, {given.ranks} ranks | bit-equal losses, nothing lost | "
        f"{made} kills, {len(outcome.problems)} problems | {'yes' if passed else 'no'}"
    )


if __name__ == "__main__":
    main()
