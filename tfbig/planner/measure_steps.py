"""Runs in a process of its own: times and memory of a few small training steps, as JSON.

usage: python -m tfbig.planner.measure_steps NUM_THREADS SHAPES STEPS [machine]

SHAPES is a JSON list of {"model", "fields"}; under horovodrun each process prints its own line.
"machine" measures what products and streaming reach, too.
"""

import gc
import json
import re
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Shapes that weigh products, streaming and the fixed time of operations differently; the last two
# have many weights and few tokens, as microbatches do.
SHAPES: tuple[dict[str, dict[str, int]], ...] = tuple(
    {
        "model": {
            "embed_dim": width,
            "num_layers": layers,
            "num_heads": heads,
            "vocab_size": vocabulary,
            "max_length": length,
        },
        "fields": {"sequence_length": length, "global_batch": rows},
    }
    for width, layers, heads, length, vocabulary, rows in (
        (128, 2, 4, 128, 2048, 8),
        (384, 1, 6, 64, 8192, 16),
        (256, 2, 8, 256, 1024, 4),
        (256, 1, 4, 128, 4096, 8),
        (128, 4, 4, 256, 512, 2),
        (512, 2, 8, 128, 1024, 8),
        (384, 3, 6, 64, 8192, 4),
        (640, 2, 8, 96, 4096, 2),
    )
)
# One a process: what a process holds besides tensors grows with each model it has built. Little to
# compute: one of a few hundred megabytes, one of much state, one of many activations. A smaller
# model would hide what glibc keeps back, some 100 MB, which hardly grows from there on.
MEMORY_SHAPES: tuple[dict[str, dict[str, int]], ...] = tuple(
    {
        "model": {
            "embed_dim": width,
            "num_layers": layers,
            "num_heads": 8,
            "vocab_size": 1024,
            "max_length": length,
        },
        "fields": {"sequence_length": length, "global_batch": rows},
    }
    for width, layers, length, rows in ((192, 3, 384, 4), (1024, 2, 64, 1), (128, 4, 512, 8))
)
# Of two processes: their memory beyond a lone one's is communication's own.
PAIR_SHAPE = MEMORY_SHAPES[0]
# Of the same two: what passes as functions of their own take beyond, with little to hold and much.
MESH_SHAPES = (MEMORY_SHAPES[0], MEMORY_SHAPES[2])
STEPS = 5
PRECISIONS = ("float32", "bfloat16")


def make_batch(config: Any, rows: int) -> dict[str, Any]:
    """Returns a batch of random tokens for one data rank."""
    import numpy as np
    import tensorflow as tf

    length = config.data.sequence_length
    tokens = np.random.default_rng(0).integers(
        0, config.model.vocab_size, (rows, length + 1), np.int32
    )
    return {
        "tokens": tf.constant(tokens),
        "sample_index": tf.range(rows, dtype=tf.int64),
        "source_index": tf.zeros([rows], tf.int32),
        "loss_mask": tf.ones([rows, length], tf.uint8),
    }


def reset_peak() -> None:
    """Forgets this process's peak of resident memory."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def resident(name: str = "VmHWM") -> int:
    """Returns this process's peak (VmHWM) or present (VmRSS) resident bytes."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found, name
    return int(found[1]) * 1024


def run_steps(config: Any, steps: int = STEPS) -> dict[str, Any]:
    """Returns median seconds, peak bytes and rank of some steps of a trainer."""
    import trainers

    reset_peak()
    trainer = trainers.start(config)
    trainer.build()
    batch = make_batch(config, config.run.global_batch // trainer.data_size)
    seconds = []
    for step in range(steps + 1):
        start = time.perf_counter()
        trainer.train_step(batch, step, 1e-3, 0.0, 0).loss_sum.numpy()
        seconds.append(time.perf_counter() - start)
    saw = {
        "seconds": statistics.median(seconds[1:]),
        "fastest": min(seconds[1:]),
        "peak_bytes": resident(),
        "rank": trainer.rank,
        "communication": trainer.timings()(),
    }
    trainer.barrier(60)
    trainer.close()
    return saw


def matrix_flops(precision: str, size: int = 1024, repeats: int = 8) -> float:
    """Returns the FLOP/s of the best of a few large products in a precision."""
    import tensorflow as tf

    left = tf.cast(tf.random.stateless_normal([size, size], [1, 2]), precision)
    product = tf.function(lambda a, b: tf.reduce_max(tf.matmul(a, b)), autograph=False)
    product(left, left)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        product(left, left).numpy()
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best


def stream_bytes(megabytes: int = 64, repeats: int = 8) -> float:
    """Returns the bytes/s that adding to a large tensor reads and writes, at best."""
    import tensorflow as tf

    x = tf.zeros([megabytes << 18])
    add = tf.function(lambda a: a + 1.0, autograph=False)
    add(x)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        add(x)[0].numpy()
        best = min(best, time.perf_counter() - start)
    return 2.0 * (megabytes << 20) / best


def config_of(shape: Mapping[str, Any], num_threads: int) -> Any:
    """Returns the config of a shape."""
    from tfbig.config import Config, ModelConfig, replace_fields

    values = {"strategy": "single", "num_threads": num_threads} | dict(shape["fields"])
    return replace_fields(Config(model=ModelConfig(**shape["model"])), values)


def main(arguments: Sequence[str]) -> None:
    """Prints what this process saw."""
    from tfbig.command import quiet_tensorflow

    quiet_tensorflow()
    num_threads = int(arguments[0])
    shapes, steps = json.loads(arguments[1]), int(arguments[2])
    with_machine = arguments[3:] == ["machine"]
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(num_threads)
    tf.config.threading.set_inter_op_parallelism_threads(num_threads)
    base = resident("VmRSS")
    rows = []
    for shape in shapes:
        rows.append(run_steps(config_of(shape, num_threads), steps) | dict(shape))
    answer = {
        "num_threads": num_threads,
        "imported_bytes": base,
        "matrix_flops": {p: matrix_flops(p) for p in PRECISIONS} if with_machine else {},
        "stream_bytes": stream_bytes() if with_machine else 0.0,
        "steps": rows,
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1:])
