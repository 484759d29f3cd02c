"""Trains like `tfbig.train`, until something befalls one rank.

usage: fault_worker.py KIND RANK STEP FLAGS..., where KIND is
  exit0    the rank's process ends with code 0
  short    the rank takes the step for the run's last: it evaluates and saves, while others train
  stop     the rank's process is stopped by SIGSTOP
  flip     one bit of one weight changes, of the rank's last replica
  SIGTERM, SIGUSR1   the rank, and no other, gets that signal
When it befalls, and when each rank leaves with which code, is printed on the machine's monotonic
clock.
"""

import dataclasses
import os
import signal
import sys
import time

import numpy as np

from tfbig.command import launched_rank, quiet_tensorflow

quiet_tensorflow()

from tfbig import train  # noqa: E402
from tfbig.loop import Loop  # noqa: E402


def befall(kind: str, loop: Loop) -> None:
    if kind == "exit0":
        os._exit(0)
    if kind == "short":
        run = dataclasses.replace(loop.config.run, steps=loop.progress.step + 1)
        loop.config = dataclasses.replace(loop.config, run=run)
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, kind))
    if kind == "flip":
        variable = loop.trainer._locals[-1].variables["transformer_blocks/0/ffn/up/bias"]
        bits = variable.numpy().view(np.uint32)
        bits[3] ^= 1
        variable.assign(bits.view(np.float32))


def main(kind: str, rank: int, step: int, flags: list[str]) -> None:
    if launched_rank() == rank:
        real = Loop._launch

        def launch(self, progress):
            if progress.step == step:
                print(f"befell at {time.monotonic()}", flush=True)
                befall(kind, self)
            return real(self, progress)

        Loop._launch = launch
    try:
        train.main(flags)
    except SystemExit as stop:
        print(f"left with code {stop.code} at {time.monotonic()}", flush=True)
        raise


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
