"""From the command to the first step's result, by cause, and the time of every --help.

usage: python -m benchmarks.start_up [--quick] [--preset=NAME] [--before=SECONDS]

A process trains the preset for two steps by the real command, with a clock at its parts; CPU
seconds stand beside wall seconds, as a busy machine stretches these. The second step's time is
taken from the first one's: what is left was tracing. --before is the CPU time of all of it that
another commit took on the same machine, to hold this one against. Two processes under horovodrun
are then timed as a restart finds them: new, and going on from a checkpoint.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TURNS, HELP_TURNS, HELP_BAR = 3, 3, 1.0
RESTART_BAR = 1.25  # times a new run's start: reading the state is not what a restart consists of
COMMANDS = (
    "prepare train evaluate generate export serve plan report data checkpoints launch doctor"
    " install_horovod"
).split()
MODULES = ["tfbig", *(f"tfbig.{command}" for command in COMMANDS)]


class Clock:
    """Wall and CPU seconds of the parts of a process, from its start."""

    def __init__(self) -> None:
        import psutil

        self._wall, self._cpu = psutil.Process().create_time(), 0.0
        self.parts: dict[str, tuple[float, float]] = {}

    def mark(self, name: str) -> None:
        """Puts what has passed since the last mark to a part's account."""
        wall, cpu = time.time(), time.process_time()
        before = self.parts.get(name, (0.0, 0.0))
        self.parts[name] = before[0] + wall - self._wall, before[1] + cpu - self._cpu
        self._wall, self._cpu = wall, cpu


def timed(clock: Clock, method: Any, name: str) -> Any:
    """Returns a trainer's method with a clock around it; steps are counted apart."""
    calls = iter(range(1_000_000))

    @functools.wraps(method)
    def run(*arguments: Any, **fields: Any) -> Any:
        clock.mark("data, run folder, checks")
        result = method(*arguments, **fields)
        count = next(calls)
        if name == "step":
            result.loss_sum.numpy()  # waits for the step
        clock.mark(name if name != "step" else f"step {count + 1}")
        return result

    return run


def worker(arguments: list[str]) -> None:
    """Runs the training command with a clock at its parts."""
    clock = Clock()
    clock.mark("Python")
    import tfbig.train

    clock.mark("the command's imports, TensorFlow-free")
    import tensorflow  # noqa: F401

    clock.mark("import of TensorFlow")
    import keras  # noqa: F401

    clock.mark("import of Keras")
    from trainers.single import SingleTrainer

    clock.mark("import of the trainer")
    for method, name in (("__init__", "devices"), ("build", "variables"), ("train_step", "step")):
        setattr(SingleTrainer, method, timed(clock, getattr(SingleTrainer, method), name))
    try:
        tfbig.train.main(arguments)
    finally:
        print("\n@" + json.dumps(clock.parts), flush=True)


def measure(preset: str, folder: Path, turn: int) -> dict[str, tuple[float, float]]:
    """Returns wall and CPU seconds of each part of one start."""
    flags = [
        f"--preset={preset}",
        f"--data={folder / 'data'}",
        f"--run_dir={folder / f'run_{turn}'}",
        "--steps=2",
        "--eval_every=0",
        "--checkpoint_every=0",
    ]
    command = [sys.executable, "-m", "benchmarks.start_up", "--worker", *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=3000)
    lines = [line for line in done.stdout.splitlines() if line.startswith("@")]
    if done.returncode or not lines:
        sys.exit(f"the training command failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return json.loads(lines[-1][1:])


def prepare(preset: str, folder: Path) -> None:
    """Writes a little text and prepares it in the preset's sizes."""
    from tfbig import presets

    config = presets.preset(preset)
    (folder / "text").mkdir()
    for number in range(40):
        words = [f"{word:x}" for word in range(1000 * number, 1000 * number + 1000)]
        (folder / "text" / f"{number}.txt").write_text(" ".join(words) + "\n")
    sizes = [
        f"--sequence_length={config.data.sequence_length}",
        f"--vocab_size={config.model.vocab_size}",
    ]
    command = [sys.executable, "-m", "tfbig.prepare", f"--source={folder / 'text'}", *sizes]
    subprocess.run([*command, f"--data={folder / 'data'}"], check=True, cwd=ROOT, timeout=3000)


def first_step(preset: str, turns: int, before: float) -> str:
    """Prints the parts of a start and returns its bar."""
    with tempfile.TemporaryDirectory() as name:
        prepare(preset, Path(name))
        starts = [measure(preset, Path(name), turn) for turn in range(turns)]
    parts = {
        part: [statistics.median(start[part][kind] for start in starts) for kind in (0, 1)]
        for part in starts[0]
    }
    second, first = parts.pop("step 2"), parts.pop("step 1")
    parts["tracing of the first step"] = [a - b for a, b in zip(first, second, strict=True)]
    parts["the step itself"] = second
    print(f"{preset}, from the command to the first step: wall seconds, CPU seconds")
    for part, (wall, cpu) in parts.items():
        print(f"  {part:<40}{wall:>8.2f}{cpu:>8.2f}")
    wall, cpu = (sum(values) for values in zip(*parts.values(), strict=True))
    print(f"  {'together':<40}{wall:>8.2f}{cpu:>8.2f}", flush=True)
    title = f"CPU seconds from the command to the first step, {preset}"
    if not before:
        return f"{title} | half of --before | {cpu:.2f} | skipped"
    return f"{title} | <= {before / 2:.2f} | {cpu:.2f} | {'yes' if cpu <= before / 2 else 'no'}"


def launch(preset: str, folder: Path, turn: int, steps: int) -> float:
    """Trains on two processes; returns wall seconds from the command to its first step's result."""
    from tfbig.run_folder import read_events

    run_dir = folder / f"launch_{turn}"
    flags = [f"--preset={preset}", f"--data={folder / 'data'}", f"--run_dir={run_dir}"]
    flags += ["--strategy=horovod", f"--steps={steps}", "--eval_every=0"]
    horovodrun = str(Path(sys.executable).with_name("horovodrun"))
    command = [horovodrun, "-np", "2", sys.executable, "-m", "tfbig.train", *flags]
    begin = time.time()
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=3000)
    if done.returncode:
        sys.exit(f"the training command failed:\n{done.stdout[-4000:]}\n{done.stderr[-2000:]}")
    events = read_events(run_dir)
    return [event["time"] for event in events if event["event"] == "first_step"][-1] - begin


def restart(preset: str, turns: int) -> str:
    """Prints what a start and a restart on two processes take and returns the bar."""
    with tempfile.TemporaryDirectory() as name:
        prepare(preset, Path(name))
        first = [launch(preset, Path(name), turn, 2) for turn in range(turns)]
        again = [launch(preset, Path(name), turn, 4) for turn in range(turns)]
    fresh, resumed = statistics.median(first), statistics.median(again)
    print(f"{preset}, horovodrun -np 2, from the command to the first step: wall seconds")
    print(f"  a new run {fresh:.1f} (of {[round(s, 1) for s in first]})")
    print(f"  from a checkpoint {resumed:.1f} (of {[round(s, 1) for s in again]})", flush=True)
    title = "restart on two processes to its first step, against a start"
    met = "yes" if resumed <= RESTART_BAR * fresh else "no"
    return f"{title} | <= {RESTART_BAR:g} times | {resumed / fresh:.2f} ({resumed:.1f} s) | {met}"


def help_seconds(module: str, turns: int) -> float:
    """Returns the least wall seconds of a module's --help."""
    best = float("inf")
    for _ in range(turns):
        start = time.perf_counter()
        arguments = [sys.executable, "-m", module, "--help"]
        subprocess.run(arguments, capture_output=True, check=True, cwd=ROOT, timeout=300)
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    """Prints the parts, then one line a bar."""
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one start, and --help once")
    parser.add_argument("--preset", default="gpt_tiny", help="the model")
    parser.add_argument("--before", type=float, default=0.0, help="CPU seconds to halve")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    turns = 1 if options.quick else TURNS
    lines = [first_step(options.preset, turns, options.before), restart(options.preset, turns)]
    for module in MODULES:
        seconds = help_seconds(module, 1 if options.quick else HELP_TURNS)
        met = "yes" if seconds < HELP_BAR else "no"
        lines.append(
            f"{module.replace('.', ' ')} --help, seconds | < {HELP_BAR:g} | {seconds:.2f} | {met}"
        )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
