"""What the watchdog costs: the training thread's time a step, and the watching thread's share.

usage: python -m benchmarks.watchdog [--quick]

CPU time of the thread itself is counted, which a busy machine hardly stretches. Rank 0's thread is
measured, which alone reads the heartbeats of all; those of the others are written beforehand.
"""

import argparse
import tempfile
import time
from pathlib import Path

from tfbig.heartbeat import Heartbeats, Pulse
from tfbig.metrics import StepTimes
from tfbig.run_folder import RunFolder
from tfbig.watchdog import Watchdog

INTERVAL = 2.0  # seconds between two looks, as tfbig/watchdog.py has it
SIZES, JUDGED = (2, 64, 512), 64
STEP_BAR, SHARE_BAR = 20e-6, 0.005  # seconds of a step; of one core, at so many ranks


def step_seconds(num_steps: int) -> float:
    """Returns the training thread's CPU seconds a step: what tfbig/loop.py tells the pulse."""
    pulse, times = Pulse(), StepTimes(0.1, 0.001, {"data": 0.01})
    start = time.thread_time()
    for step in range(num_steps):
        pulse.enter("data", step)
        pulse.enter("step", step + 1)
        pulse.note_times(times)
    return (time.thread_time() - start) / num_steps


def look_seconds(folder: Path, size: int, num_looks: int) -> float:
    """Returns rank 0's CPU seconds a look: its heartbeat is written, all are read and compared."""
    pulse, run = Pulse(), RunFolder(folder)
    run.heartbeats_dir.mkdir(parents=True)
    pulse.enter("step", 7)
    for _ in range(2):
        pulse.note_times(StepTimes(0.1, 0.001, {"data": 0.01}))
    for rank in range(1, size):
        Heartbeats(run.heartbeats_dir, rank, size).write(pulse)
    watchdog = Watchdog(run, 0, size, timeout=1800.0)  # not entered: this thread does its work
    start = time.thread_time()
    for _ in range(num_looks):
        watchdog._heartbeats.write(pulse)
        watchdog._look()
    return (time.thread_time() - start) / num_looks


def main() -> None:
    """Prints the costs, then one line a bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    step = step_seconds(1_000 if given.quick else 100_000)
    print(f"the training thread: {1e6 * step:.1f} us a step")
    shares = {}
    with tempfile.TemporaryDirectory() as name:
        for size in SIZES:
            look = look_seconds(Path(name) / str(size), size, 3 if given.quick else 50)
            shares[size] = look / INTERVAL
            print(
                f"rank 0's watchdog of {size} ranks: {1e3 * look:.2f} ms every {INTERVAL:g} s, "
                f"{shares[size]:.3%} of a core"
            )
    met = "yes" if step <= STEP_BAR else "no"
    print(f"the watchdog, of each step | <= {1e6 * STEP_BAR:.0f} us | {1e6 * step:.1f} us | {met}")
    met = "yes" if shares[JUDGED] <= SHARE_BAR else "no"
    title = f"rank 0's watchdog of {JUDGED} ranks, of a core"
    print(f"{title} | <= {SHARE_BAR:.1%} | {shares[JUDGED]:.2%} | {met}")


if __name__ == "__main__":
    main()
