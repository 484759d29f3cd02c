"""GELU compiled by XLA and layer norm's own gradient against plain ones, forward and backward.

usage: python benchmarks/activation.py [--quick]

Each pair takes turns. CPU time is counted, of one thread, so that others on the machine matter
little.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

SHAPE = (8, 256)  # rows and positions of the 13.9M model
HIDDEN, WIDTH = 1536, 384  # of its feed-forward layer and of its norms
GELU_BAR, NORM_BAR = 0.5, 0.9  # times the plain form, at most


def compare(what: str, functions: Mapping[str, Callable], rounds: int, bar: float) -> None:
    """Prints the median CPU time of two functions without arguments, and a bar's line.

    Args:
      what: is computed.
      functions: ours and then the plain one, by name.
      rounds: that count.
      bar: most that ours may take, times the plain one.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds + 2):
        for name, function in functions.items():
            start = time.process_time()
            function().numpy()
            if number >= 2:  # the first ones trace and compile
                seconds[name].append(time.process_time() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in medians.items():
        print(f"{what}, {name}: {1e3 * value:.1f} ms of CPU time")
    own, plain = medians.values()
    names = " / ".join(medians)
    met = "yes" if own <= bar * plain else "no"
    print(f"{what}, {names} | at most {bar} | {own / plain:.2f} | {met}")


def main() -> None:
    """Prints the medians and one line a bar."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    os.environ["OMP_NUM_THREADS"] = "1"
    from tfbig.command import quiet_tensorflow

    quiet_tensorflow()
    import keras
    import tensorflow as tf

    from tfbig.model import activation
    from tfbig.model.layer_norm import LayerNorm

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    rounds = 3 if "--quick" in sys.argv else 15

    def with_gradient(function: Callable, x: tf.Tensor, variables: list, spec: tf.TensorSpec):
        @tf.function(autograph=False, input_signature=[spec])
        def run(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = function(x)
            gradients = tape.gradient(y, [x, *variables])
            with tf.control_dependencies(gradients[1:]):
                return tf.identity(gradients[0])

        return lambda: run(x)

    for dtype in (tf.float32, tf.bfloat16):
        x = tf.cast(tf.random.stateless_normal([*SHAPE, HIDDEN], [1, 2]), dtype)
        # A shape that is not known keeps plain operations, as in graphs that are saved for others.
        specs = {"compiled": x.shape, "plain": [None, *x.shape[1:]]}
        functions = {
            name: with_gradient(activation.gelu_tanh, x, [], tf.TensorSpec(shape, dtype))
            for name, shape in specs.items()
        }
        compare(f"GELU, {dtype.name}", functions, rounds, GELU_BAR)
        x = x[..., :WIDTH]
        policy = {"float32": "float32", "bfloat16": "mixed_bfloat16"}[dtype.name]
        functions = {}
        for name, kind in {"ours": LayerNorm, "Keras'": keras.layers.LayerNormalization}.items():
            norm = kind(epsilon=1e-5, dtype=policy)
            norm.build(x.shape)
            variables = [variable.value for variable in norm.trainable_variables]
            functions[name] = with_gradient(norm, x, variables, tf.TensorSpec(x.shape, dtype))
        compare(f"layer norm, {dtype.name}", functions, rounds, NORM_BAR)


if __name__ == "__main__":
    main()
