"""Kills a random rank of a training run again and again, and compares it with one left alone.

usage: python -m benchmarks.soak [--quick] [--kills 100] [--ranks 2] [--folder FOLDER]

Each kill is a SIGKILL at a moment drawn at random: during start-up, at any step, while a checkpoint
is being written, or in an evaluation. The same command then goes on. In the end the losses of all
steps must be those of the undisturbed run bit by bit (--deterministic), no sample lost or repeated,
every checkpoint readable, and no process left.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tfbig.checkpoint import list_checkpoints
from tfbig.checkpoint_reader import CheckpointReader
from tfbig.run_folder import read_metrics

MOMENTS = ("start-up", "step", "step", "checkpoint", "checkpoint", "evaluation")
START_SECONDS = 900.0  # a loaded machine
CHECKPOINT_EVERY, EVAL_EVERY = 5, 15
COMPARED = ("loss", "grad_norm", "learning_rate", "consumed_samples")


class Outcome(NamedTuple):
    """What a soak has shown."""

    kills: Counter  # by moment
    problems: list[str]


def make_data(folder: Path) -> list[str]:
    """Prepares 40 small files of the standard library; returns flags of a very small model."""
    import json
    import sysconfig

    from data_pipeline.preparation import prepare
    from tfbig.config import PrepareConfig

    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    lines = [json.dumps({"text": path.read_text(encoding="utf-8")[:6000]}) for path in paths]
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")
    sizes = {"sequence_length": 32, "vocab_size": 384}
    prepare(
        PrepareConfig(
            data=str(folder / "data"),
            source=str(folder / "text.jsonl"),
            validation_fraction=0.15,
            **sizes,
        )
    )
    return (
        f"--data={folder / 'data'} --sequence_length=32 --max_length=32 --vocab_size=384"
        " --embed_dim=32 --num_layers=1 --num_heads=2 --dropout=0.1 --warmup_steps=3"
        " --decay_steps=400"
    ).split()


def command_of(flags: list[str], run_dir: Path, steps: int, num_ranks: int) -> list[str]:
    """Returns the command of a run, under horovodrun for several ranks."""
    launcher = [str(Path(sys.executable).with_name("horovodrun")), "-np", str(num_ranks)]
    strategy = "horovod" if num_ranks > 1 else "single"
    return [
        *(launcher if num_ranks > 1 else []),
        *(sys.executable, "-m", "tfbig.train", f"--strategy={strategy}", "--deterministic"),
        *(f"--run_dir={run_dir}", f"--steps={steps}", f"--checkpoint_every={CHECKPOINT_EVERY}"),
        *(f"--eval_every={EVAL_EVERY}", "--notensorboard", "--global_batch=6", *flags),
    ]


def start(command: list[str], log: Path) -> subprocess.Popen:
    """Starts a run in a session of its own, few threads a process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    environment["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "60"
    with open(log, "ab") as file:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def processes_of(run_dir: Path) -> list[int]:
    """Returns the Python processes that train in a folder."""
    found = []
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            try:
                words = (directory / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"--run_dir={run_dir}".encode() in words and words[0].endswith(b"python"):
                found.append(int(directory.name))
    return sorted(found)


def kill_at(moment: str, run_dir: Path, process: subprocess.Popen, generator: random.Random) -> str:
    """Waits for a moment and kills a random rank; returns the moment, or "ended" without a kill."""
    deadline = time.monotonic() + START_SECONDS
    metrics, checkpoints = run_dir / "metrics.jsonl", run_dir / "checkpoints"

    def wait_until(condition) -> bool:
        while process.poll() is None and time.monotonic() < deadline:
            if condition():
                return True
            time.sleep(0.001)
        return False

    def num_records() -> int:
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def is_writing() -> bool:
        for path in checkpoints.glob("step_*"):
            if not (path / "manifest.json").exists():
                return True
        return False

    if moment == "start-up":
        arrived = wait_until(lambda: len(processes_of(run_dir)) > 0)
        time.sleep(generator.uniform(0, 4))
    else:
        before = num_records()
        extra = generator.randint(1, 2 * CHECKPOINT_EVERY)
        if moment == "evaluation":
            last = (before + 1) // EVAL_EVERY * EVAL_EVERY
            extra = max(1, last + EVAL_EVERY - before)
        arrived = wait_until(lambda: num_records() >= before + extra)
        if moment == "checkpoint":
            arrived = arrived and wait_until(is_writing)
    ranks = [pid for pid in processes_of(run_dir) if pid != process.pid] or [process.pid]
    if not arrived or process.poll() is not None:
        return "ended"
    try:
        os.kill(generator.choice(ranks), signal.SIGKILL)
    except ProcessLookupError:
        return "ended"
    return moment


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
    kills: Counter = Counter()
    problems: list[str] = []
    while kills.total() < num_kills and not problems:
        process = start(command_of(flags, killed, steps, num_ranks), folder / "killed.log")
        moment = kill_at(generator.choice(MOMENTS), killed, process, generator)
        if moment != "ended":
            kills[moment] += 1
        problems += problems_after_a_kill(killed, process)
        if moment == "ended":
            break
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
    given = parser.parse_args()
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
