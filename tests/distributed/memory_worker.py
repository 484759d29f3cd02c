"""Writes each rank's peak resident memory of a few training steps, for each case of a launch.

usage: memory_worker.py OUTPUT CASES_JSON

A case is {"name", "fields" (of Config), "model" (of ModelConfig)}. The peak is Linux's VmHWM,
reset before each case.
"""

import gc
import json
import re
import sys
from pathlib import Path

import numpy as np

from tfbig.command import quiet_tensorflow

quiet_tensorflow()

import tensorflow as tf  # noqa: E402

import trainers  # noqa: E402
from tfbig.config import Config, ModelConfig, replace_fields  # noqa: E402


def reset_peak() -> None:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Returns the peak of resident memory without what files are mapped to, which varies."""
    status = Path("/proc/self/status").read_text()
    peak, mapped = (
        int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) for name in ("VmHWM", "RssFile")
    )
    return 1024 * (peak - mapped)


def run_case(case: dict) -> dict:
    config = replace_fields(Config(model=ModelConfig(**case["model"])), case["fields"])
    reset_peak()
    trainer = trainers.trainer_class(config.parallel.strategy)(config)
    trainer.build()
    rows = config.run.global_batch // trainer.data_size
    length = config.data.sequence_length
    random = np.random.default_rng(0)
    batch = {
        "tokens": tf.constant(
            random.integers(0, config.model.vocab_size, (rows, length + 1), np.int32)
        ),
        "sample_index": tf.range(rows, dtype=tf.int64),
        "source_index": tf.zeros([rows], tf.int32),
        "loss_mask": tf.ones([rows, length], tf.uint8),
    }
    built = peak_bytes()
    for step in range(3):
        trainer.train_step(batch, step, 1e-3, 0.0, 0)
    stage = trainer.partition.stages[trainer.places["pipeline"]]
    saw = {
        "rank": trainer.rank,
        "built": built,
        "peak": peak_bytes(),
        "num_parameters": stage.num_parameters,
        "state_bytes": stage.state_bytes,
        "activation_bytes": stage.activation_bytes * stage.in_flight,
    }
    trainer.barrier(60)
    trainer.close()
    return saw


def main() -> None:
    output, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    for case in cases:
        saw = run_case(case)
        (output / f"{case['name']}_{saw['rank']}.json").write_text(json.dumps(saw))


if __name__ == "__main__":
    main()
