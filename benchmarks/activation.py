"""GELU as two formulas compiled by XLA against plain operations: forward and backward, interleaved.

usage: python benchmarks/activation.py [--quick]

CPU time is counted, of one thread, so that others on the machine matter little.
"""

import os
import statistics
import sys
import time
from pathlib import Path

SHAPE = (8, 256, 1536)  # rows, positions and feed-forward width of the 13.9M model
BAR = 0.5  # times the plain form, at most


def main() -> None:
    """Prints the medians and one line a bar."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    os.environ["OMP_NUM_THREADS"] = "1"
    from tfbig.command import quiet_tensorflow

    quiet_tensorflow()
    import tensorflow as tf

    from tfbig.model import activation

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    rounds = 3 if "--quick" in sys.argv else 15

    def with_gradient(shape):
        # A shape that is not known keeps plain operations, as in graphs that are saved for others.
        @tf.function(autograph=False, input_signature=[shape])
        def run(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = activation.gelu_tanh(x)
            return tape.gradient(y, x)

        return run

    for dtype in (tf.float32, tf.bfloat16):
        x = tf.cast(tf.random.stateless_normal(SHAPE, [1, 2]), dtype)
        functions = {
            "compiled": with_gradient(tf.TensorSpec(SHAPE, dtype)),
            "plain": with_gradient(tf.TensorSpec([None, *SHAPE[1:]], dtype)),
        }
        seconds: dict[str, list[float]] = {name: [] for name in functions}
        for number in range(rounds + 2):
            for name, function in functions.items():
                start = time.process_time()
                function(x).numpy()
                if number >= 2:  # the first ones trace and compile
                    seconds[name].append(time.process_time() - start)
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        for name, value in medians.items():
            print(f"GELU, {dtype.name}, {name}: {1e3 * value:.1f} ms of CPU time")
        ratio = medians["compiled"] / medians["plain"]
        met = "yes" if ratio <= BAR else "no"
        print(f"GELU, {dtype.name}, compiled / plain | at most {BAR} | {ratio:.2f} | {met}")


if __name__ == "__main__":
    main()
