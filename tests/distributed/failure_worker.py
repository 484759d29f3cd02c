"""Trains two pipeline stages until rank 1 fails in the middle of a step.

usage: failure_worker.py KIND, of which "error" raises, "memory" asks for more than there is, and
"kill" ends the process by SIGKILL.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence

from tfbig.command import quiet_tensorflow, run_command

quiet_tensorflow()

import tensorflow as tf  # noqa: E402

import trainers  # noqa: E402
from tests.distributed import parity_worker  # noqa: E402

FIELDS = {"strategy": "pipeline", "pipeline_parallel_degree": 2, "microbatches": 4}


def fail(kind: str) -> None:
    print(f"befell at {time.monotonic()}", flush=True)
    if kind == "error":
        raise ArithmeticError("the broken part of rank 1")
    if kind == "memory":
        tf.ones([1 << 30, 1 << 20]) + 1  # 4 PiB
    os.kill(os.getpid(), signal.SIGKILL)


def body(arguments: Sequence[str]) -> None:
    config = parity_worker.make_config({"fields": FIELDS})
    trainer = trainers.trainer_class("pipeline")(config)
    try:
        trainer.build(num_sources=parity_worker.NUM_SOURCES)
        for step in range(3):
            if step == 1 and trainer.rank == 1:
                chunk = trainer._chunks[0]
                backward = chunk.backward

                def broken(index, upstream, backward=backward):
                    if index == 1:
                        fail(arguments[0])
                    return backward(index, upstream)

                chunk.backward = broken
            trainer.train_step(parity_worker.local_batch(trainer, step), step, 0.1, 0.0, 0)
            print(f"rank {trainer.rank} made step {step}", flush=True)
    finally:
        trainer.close()


if __name__ == "__main__":
    run_command("train", body, sys.argv[1:])
