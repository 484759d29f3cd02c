"""Blockwise attention against the plain form, forward and backward of one layer.

usage: python benchmarks/attention.py [--quick]

Both forms take turns in one process, and medians of CPU seconds count: they say where
`--attention=auto` should change from one to the other.
"""

import statistics
import sys
import time

from tfbig.command import quiet_tensorflow

quiet_tensorflow()

import tensorflow as tf  # noqa: E402

from tfbig.model.attention import causal_attention  # noqa: E402
from tfbig.model.blockwise_attention import FASTER_FROM, BlockwiseAttention  # noqa: E402

SHAPES = ((256, 8, 6), (512, 4, 6), (1024, 2, 12), (4096, 1, 6))  # (positions, rows, heads)
HEAD_DIM = 64


def passes(attend):
    """Returns a function of query, key and value that gives their gradients."""

    @tf.function(autograph=False)
    def run(query, key, value):
        with tf.GradientTape() as tape:
            tape.watch([query, key, value])
            total = tf.reduce_sum(attend(query, key, value))
        return tape.gradient(total, [query, key, value])

    return run


def main() -> None:
    """Prints one line a shape; from FASTER_FROM on, the blockwise form must be the faster one."""
    quick = "--quick" in sys.argv
    for length, rows, heads in SHAPES[:3] if quick else SHAPES:
        shape = (rows, length, heads, HEAD_DIM)
        tensors = [tf.random.stateless_normal(shape, [0, index]) for index in range(3)]
        forms = {"plain": passes(causal_attention), "blockwise": passes(BlockwiseAttention())}
        seconds: dict[str, list[float]] = {name: [] for name in forms}
        for turn in range(4 if quick else 8):
            for name, run in forms.items():
                start = time.process_time()
                run(*tensors)[0].numpy()
                if turn:  # the first one traces
                    seconds[name].append(time.process_time() - start)
        ratio = statistics.median(seconds["plain"]) / statistics.median(seconds["blockwise"])
        name = f"plain / blockwise, {length} positions, {rows} x {heads} heads"
        if length < FASTER_FROM:
            print(f"{name}: {ratio:.2f} (auto takes the plain form)")
        else:
            print(f"{name} | >= 1 | {ratio:.2f} | {'yes' if ratio >= 1 else 'no'}")


if __name__ == "__main__":
    main()
