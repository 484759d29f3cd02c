"""Horovod's tape against our buckets: the same steps, interleaved, in the same two processes.

usage: python benchmarks/gradient_reduction.py [--quick]
"""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

NUM_PROCESSES = 2
BAR = 1.15  # neither way may cost more than this, relative to the other


def worker(quick: bool) -> None:
    """Times both reductions in one process of the launch."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tfbig.command import quiet_tensorflow

    quiet_tensorflow()
    import numpy as np
    import tensorflow as tf

    from tfbig.train import config_from
    from trainers.horovod import HorovodTrainer

    shape = {"embed_dim": 64, "num_layers": 2} if quick else {"embed_dim": 256, "num_layers": 6}
    length, rows, rounds = (32, 4, 6) if quick else (128, 8, 15)
    random = np.random.default_rng(0)
    batch = {
        "tokens": tf.constant(random.integers(0, 4096, (rows, length + 1), np.int32)),
        "sample_index": tf.range(rows, dtype=tf.int64),
        "source_index": tf.zeros([rows], tf.int32),
        "loss_mask": tf.ones([rows, length], tf.uint8),
    }
    seconds: dict[str, list[float]] = {}
    # One engine serves both trainers, so that their steps can alternate.
    base = {"strategy": "horovod", "num_heads": 4, "max_length": length, **shape}
    tape = HorovodTrainer(config_from({**base, "gradient_reduction": "tape"}))
    tape.build()
    buckets = HorovodTrainer.__new__(HorovodTrainer)
    buckets.__dict__.update(tape.__dict__)
    buckets.config = config_from({**base, "gradient_reduction": "buckets"})
    buckets._reduction = "buckets"
    buckets.build()
    for step in range(rounds + 2):
        for name, trainer in (("tape", tape), ("buckets", buckets)):
            tape.barrier(60)
            start = time.perf_counter()
            trainer.train_step(batch, step, 1e-3, 0.0, 0).loss_sum.numpy()
            if step >= 2:  # the first ones trace
                seconds.setdefault(name, []).append(time.perf_counter() - start)
    if tape.rank == 0:
        print("result " + json.dumps({n: statistics.median(s) for n, s in seconds.items()}))
    tape.close()


def main() -> None:
    """Starts the processes and prints one line a bar."""
    quick = "--quick" in sys.argv
    if "--worker" in sys.argv:
        worker(quick)
        return
    command = [
        str(Path(sys.executable).with_name("horovodrun")),
        "-np",
        str(NUM_PROCESSES),
        sys.executable,
        __file__,
        "--worker",
        *(["--quick"] if quick else []),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    lines = [line for line in done.stdout.splitlines() if "result {" in line]
    if done.returncode or not lines:
        sys.exit(f"the benchmark's processes failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    medians = json.loads(lines[0][lines[0].index("{") :])
    ratio = medians["tape"] / medians["buckets"]
    for name, seconds in medians.items():
        print(f"median step with {name}: {seconds * 1e3:.1f} ms")
    met = "yes" if 1 / BAR <= ratio <= BAR else "no"
    print(f"tape / buckets, step time | between {1 / BAR:.2f} and {BAR} | {ratio:.2f} | {met}")


if __name__ == "__main__":
    main()
