"""Trains like `tfbig.train`, and meets a failure every so many steps: what endurance.py starts.

usage: failing_run.py FOLDER EVERY FLAGS...

The failures come in turn, see `FAILURES`; FOLDER holds a note of each, so that none comes again
when its step is made anew.
"""

import os
import signal
import sys
from pathlib import Path

from tfbig.command import quiet_tensorflow

quiet_tensorflow()

from tfbig import train  # noqa: E402
from tfbig.bad_steps import BadSteps  # noqa: E402
from tfbig.loop import Loop  # noqa: E402

# bad: the step's loss is above a limit, so that the run rolls back, in the same processes. kill: a
# rank is killed. raise: a rank raises. After the last two all are started again.
FAILURES = (*("bad",) * 9, "kill", *("bad",) * 9, "raise")


class Failures:
    """What befalls this process.

    Args:
      folder: of the notes.
      every: steps from one failure to the next.
    """

    def __init__(self, folder: Path, every: int) -> None:
        self._folder, self._every = folder, every
        folder.mkdir(parents=True, exist_ok=True)

    def kind_at(self, step: int) -> str:
        """Returns the failure of a step, counted from 1; "" for none."""
        if step % self._every:
            return ""
        return FAILURES[(step // self._every - 1) % len(FAILURES)]

    def is_new(self, step: int, rank: int) -> bool:
        """Returns whether a step's failure has not been there; from then on it has."""
        try:
            os.close(os.open(self._folder / f"step-{step}-rank-{rank}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


def main(folder: str, every: int, flags: list[str]) -> None:
    """Trains; the ranks take turns at failing."""
    failures, launch, limit = Failures(Path(folder), every), Loop._launch, BadSteps.limit
    rank = int(os.environ.get("HOROVOD_RANK", "0"))
    size = int(os.environ.get("HOROVOD_SIZE", "1"))

    def failing_launch(self, progress):
        step = progress.step + 1
        kind = failures.kind_at(step)
        turn = step // every // (len(FAILURES) // 2)
        if kind in ("kill", "raise") and rank == turn % size:
            if failures.is_new(step, rank):
                if kind == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ArithmeticError(f"what befalls rank {rank} at step {step}")
        return launch(self, progress)

    def failing_limit(self, step):
        is_bad = failures.kind_at(step) == "bad" and failures.is_new(step, rank)
        return 1e-3 if is_bad else limit(self, step)

    Loop._launch, BadSteps.limit = failing_launch, failing_limit
    train.main(flags)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
