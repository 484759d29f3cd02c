"""Dropout by hash against tf.nn.dropout: forward and backward, interleaved, in one process.

usage: python benchmarks/dropout.py [--quick]
"""

import statistics
import sys
import time
from pathlib import Path

SHAPE = (8, 256, 768)
RATE = 0.1
BAR = 1.0  # times tf.nn.dropout, at most


def main() -> None:
    """Prints the medians and one line a bar."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tfbig.command import quiet_tensorflow

    quiet_tensorflow()
    import tensorflow as tf

    from tfbig.model.dropout import dropout, sample_keys

    quick = "--quick" in sys.argv
    rounds = 5 if quick else 40
    x = tf.random.stateless_normal(SHAPE, [1, 2])
    samples = tf.range(SHAPE[0], dtype=tf.int64)

    def by_hash(x: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        return dropout(x, sample_keys(0, step, 0, 0, samples), RATE)

    def by_tensorflow(x: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        return tf.nn.dropout(x, RATE)

    def with_gradient(function, jit_compile: bool):
        def run(x: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = function(x, step)
            return tf.reduce_sum(tape.gradient(y, x)) + tf.reduce_sum(y)

        return tf.function(run, autograph=False, jit_compile=jit_compile)

    functions = {
        "hash": with_gradient(by_hash, False),
        "tf.nn.dropout": with_gradient(by_tensorflow, False),
        "hash, compiled": with_gradient(by_hash, True),
        "tf.nn.dropout, compiled": with_gradient(by_tensorflow, True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds + 2):
        for name, function in functions.items():
            start = time.perf_counter()
            function(x, tf.constant(number, tf.int64)).numpy()
            if number >= 2:  # the first ones trace
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in medians.items():
        print(f"median of {name}, forward and backward on {SHAPE}: {value * 1e3:.2f} ms")
    for suffix in ("", ", compiled"):
        ratio = medians[f"hash{suffix}"] / medians[f"tf.nn.dropout{suffix}"]
        met = "yes" if ratio <= BAR else "no"
        print(
            f"dropout by hash{suffix} / tf.nn.dropout{suffix} | at most {BAR} | {ratio:.2f} | {met}"
        )


if __name__ == "__main__":
    main()
