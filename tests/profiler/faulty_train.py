"""Trains as `tfbig.train` does, with faults that its environment asks for.

TFBIG_FAULTS names some of: slow_disk (each batch comes late), leak (2 MB a step are kept), spike
(step 45 learns one word again and again), slow_rank (rank 1 computes longer), pinned_core (another
process fills the last core, and this one leaves it and waits 0.15 s for each batch).
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tfbig import train

SPIKE_STEP = 45
_KEPT: list[Any] = []


def with_faults(batches: Iterator[Any], faults: Sequence[str]) -> Iterator[Any]:
    """Yields the batches as the faults spoil them."""
    import numpy as np
    import tensorflow as tf

    for number, batch in enumerate(batches, 1):
        if "slow_disk" in faults:
            time.sleep(0.05)
        if "pinned_core" in faults:
            time.sleep(0.15)
        if "leak" in faults:
            _KEPT.append(np.ones(2 << 20, np.uint8))
        if "spike" in faults and number == SPIKE_STEP:
            batch = {**batch, "tokens": tf.fill(batch["tokens"].shape, 5)}
        yield batch


def spoil(faults: Sequence[str]) -> Any:
    """Puts the faults into the training command; returns what puts it right again."""
    batches, ordinary = train.train_batches, train._train

    def slow_down(config: Any, trainer: Any, *arguments: Any) -> int:
        step = trainer.train_step

        def late(*values: Any) -> Any:
            if trainer.rank == 1:
                time.sleep(0.6)
            return step(*values)

        if "slow_rank" in faults:
            trainer.train_step = late
        return ordinary(config, trainer, *arguments)

    train.train_batches = lambda *arguments: with_faults(batches(*arguments), faults)
    train._train = slow_down

    def mend() -> None:
        train.train_batches, train._train = batches, ordinary
        _KEPT.clear()

    return mend


@contextlib.contextmanager
def pinned_core(faults: Sequence[str]) -> Iterator[None]:
    """Keeps the last core full while the context lasts, and this process on the others."""
    if "pinned_core" not in faults:
        yield
        return
    *others, last = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, others)
    lines = ["import os", f"os.sched_setaffinity(0, [{last}])"]
    lines.append(f"while os.getppid() == {os.getpid()}: pass")
    busy = subprocess.Popen([sys.executable, "-c", "\n".join(lines)])
    try:
        yield
    finally:
        busy.kill()
        busy.wait()


if __name__ == "__main__":
    wanted = os.environ["TFBIG_FAULTS"].split(",")
    spoil(wanted)
    with pinned_core(wanted):
        train.main(sys.argv[1:])
