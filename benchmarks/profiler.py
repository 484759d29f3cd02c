"""What measuring costs, how much it writes, and how long the report of a long run takes.

`python -m benchmarks.profiler` (`--quick`: shorter runs and a smaller report).
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.synthetic_run import SyntheticRun
from tfbig.planner.measure_steps import make_batch

_BLOCK = 3  # steps with, then as many without: the machine drifts less between
# Step times of a virtual machine vary by 8% from one step to the next, its own work not being all
# that its cores do: a share of 0.2% would take thousands of steps to see. So all that measuring
# does is done as many times as often, and the difference is divided.
_TIMES = 20


def make_step() -> Callable[[int], Any]:
    """Returns a function that trains the CPU preset by one step and returns its spans."""
    from tfbig import presets
    from tfbig.config import replace_fields
    from tfbig.step_spans import StepSpans
    from trainers import trainer_class

    config = replace_fields(presets.preset("gpt_tiny"), {"num_threads": 1})
    trainer = trainer_class("single")(config)
    trainer.build(True, 1, config.model.vocab_size)
    batch = make_batch(config, config.run.global_batch)

    def step(number: int) -> StepSpans:
        start, begin = time.perf_counter(), time.time()
        trainer.train_step(batch, number, 1e-4, 0.0, 0).loss_sum.numpy()
        seconds = time.perf_counter() - start
        return StepSpans(number, begin, seconds, 0.0, trainer.timings()(), trainer.spans()())

    return step


def overhead(blocks: int) -> tuple[float, float, float]:
    """Returns (share of the step time, its standard error, bytes an hour and rank).

    One process trains the CPU preset; measuring, `_TIMES` times as often as in a run, is switched
    on and off every 3 steps, so that what else the machine does falls on both alike.
    """
    from tfbig.profiler.compilations import CompilationHook
    from tfbig.profiler.event_writer import EventWriter
    from tfbig.profiler.place import host_place
    from tfbig.profiler.sampler import Sampler
    from tfbig.profiler.step_table import StepTableWriter
    from tfbig.profiler.timeline import TimelineHook

    folder = Path(tempfile.mkdtemp(prefix="tfbig-profiler-"))
    hooks = [
        TimelineHook(
            StepTableWriter(folder, 0, {}), EventWriter(folder, 0, "host"), 0.0, interval=0.5
        ),
        CompilationHook(folder, 0),
    ]

    step = make_step()
    for number in range(3):
        step(number)
    ratios, measured_seconds, number, clock = [], 0.0, 3, time.time()
    for block in range(blocks):
        seconds = {}
        for measuring in (False, True) if block % 2 else (True, False):
            sampler = Sampler(folder, host_place({}), 0.5 / _TIMES)
            if measuring:
                sampler.start()
            # CPU time of all threads: what other processes do is in no number.
            begin = time.process_time()
            wall = time.perf_counter()
            for _ in range(_BLOCK):
                spans = step(number)
                number += 1
                if measuring:
                    # As of steps one after the other: hooks write some of them at most.
                    for _ in range(_TIMES):
                        for hook in hooks:
                            hook.on_spans(spans._replace(start=clock))
                        clock += spans.seconds
            seconds[measuring] = time.process_time() - begin
            if measuring:
                measured_seconds += time.perf_counter() - wall
                sampler.stop()
        ratios.append(seconds[True] / seconds[False] - 1)
    hooks[0].close()
    written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    error = 1.25 * statistics.stdev(ratios) / len(ratios) ** 0.5  # of a median
    share, error = statistics.median(ratios) / _TIMES, error / _TIMES
    return share, error, 3600 * written / measured_seconds / _TIMES


def direct_cost(seconds: float) -> float:
    """Returns the share of a core that the sampling thread takes, by its own clock."""
    from tfbig.profiler.cgroup_limits import find_limits
    from tfbig.profiler.host_metrics import HostMetrics
    from tfbig.profiler.system_writer import SystemWriter

    host = HostMetrics(find_limits())
    writer = SystemWriter(Path(tempfile.mkdtemp(prefix="tfbig-profiler-")), "algo-1")
    begin, count = time.thread_time(), int(seconds / 0.05)
    for index in range(count):
        writer.write(1e9 + index / 2, host.sample())
    writer.close()
    return (time.thread_time() - begin) / count / 0.5


def long_report(num_steps: int, num_ranks: int) -> tuple[float, float, int]:
    """Returns (CPU seconds, peak GB, page bytes) of the report of a run on `num_ranks` GPUs."""
    folder = Path(tempfile.mkdtemp(prefix="tfbig-profiler-")) / "long"
    run = SyntheticRun(
        num_steps, num_ranks, num_cores=96, num_gpus=8, step_seconds=0.5, same_hosts=True
    )
    run.write(folder, samples=False)
    del run
    page = folder / "report.html"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "tfbig.report", str(folder), f"--to={page}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, after.ru_maxrss / 2**20, page.stat().st_size


def _bar(name: str, bar: str, measured: str, reached: bool | None) -> str:
    word = "skipped" if reached is None else ("yes" if reached else "no")
    return f"{name} | {bar} | {measured} | {word}"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=("overhead", "report"), default="")
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    bars = []
    if arguments.only != "overhead":
        steps, ranks = (10_000, 8) if arguments.quick else (100_000, 64)
        seconds, gigabytes, size = long_report(steps, ranks)
        print(
            f"report of {steps:,} steps on {ranks} ranks: {seconds:.1f} s of CPU time,"
            f" {gigabytes:.2f} GB, a page of {size / 1e6:.1f} MB"
        )
        full = None if arguments.quick else True
        name = f"report of {steps:,} steps, {ranks} ranks"
        bars.append(_bar(name, "< 30 s", f"{seconds:.1f} s", full and seconds < 30))
        bars.append(_bar(name, "< 1 GB", f"{gigabytes:.2f} GB", full and gigabytes < 1))
    if arguments.only != "report":
        share = direct_cost(2 if arguments.quick else 10)
        print(f"one sample every 500 ms: {100 * share:.3f}% of a core")
        ratio, error, written = overhead(10 if arguments.quick else 60)
        print(f"interleaved, {_BLOCK} steps each, all {_TIMES} times as often, divided by {_TIMES}")
        measured = f"{100 * ratio:+.2f}% +- {100 * error:.2f}%"
        clear = None if error > 0.002 else ratio < 0.005
        bars.append(_bar("measuring at 500 ms, of step time", "< 0.5%", measured, clear))
        bars.append(_bar("written an hour and rank", "stated", f"{written / 1e6:.1f} MB", True))
    print("\n".join(bars))


if __name__ == "__main__":
    main()
