"""Started under horovodrun by test_collectives.py: how often collectives run, and what they return.

usage: collectives_worker.py OUTPUT. Rank 0 writes seen.json and Horovod's timeline there.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from tfbig.command import quiet_tensorflow

quiet_tensorflow()

import tensorflow as tf  # noqa: E402

from trainers.collectives import Engine, Group  # noqa: E402

CALLS = 3


def graph(body):
    return tf.function(body, autograph=False)


def run_patterns(world: Group) -> None:
    """Calls each pattern CALLS times; the names are counted in Horovod's timeline."""

    def reduce(x: tf.Tensor, name: str) -> tf.Tensor:
        return world.all_reduce(x, name)

    values = tf.constant([1.0, 2.0, 3.0])
    kept = tf.Variable([0.0, 0.0, 0.0])

    def assigned(x):
        kept.assign(reduce(x, "assigned"))

    def unused(x):
        reduce(x, "unused")
        return x

    def only_a_dependency(x):
        with tf.control_dependencies([reduce(x, "only_a_dependency")]):
            return tf.identity(x)

    inner = graph(lambda x: reduce(x, "dropped_by_the_outer_function"))

    def outer(x):
        inner(x)
        return x * 2.0

    def in_a_loop(x):
        return tf.while_loop(
            lambda i, _: i < 2, lambda i, x: (i + 1, reduce(x, "in_a_loop")), (0, x)
        )[1]

    def unused_in_a_loop(x):
        def body(i, x):
            reduce(x, "unused_in_a_loop")
            return i + 1, x

        return tf.while_loop(lambda i, _: i < 2, body, (0, x))[1]

    def recomputed(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            # The block's own backward is that of doubling; its forward is made again for it.
            block = tf.recompute_grad(lambda y: tf.stop_gradient(reduce(y, "recomputed")) * y + y)
            z = block(x)
        return tape.gradient(z, x)

    patterns = {
        "returned": lambda x: reduce(x, "returned"),
        "assigned": assigned,
        "of_a_variable": lambda x: reduce(kept.read_value() + 0.0 * x, "of_a_variable"),
        "captured": lambda x: (reduce(values, "captured"), x),
        "unused": unused,
        "only_a_dependency": only_a_dependency,
        "dropped_by_the_outer_function": outer,
        "in_a_loop": in_a_loop,
        "unused_in_a_loop": unused_in_a_loop,
        "recomputed": recomputed,
        "equal_inputs": lambda x: (reduce(x, "equal_first"), reduce(x, "equal_second")),
        "constant": lambda x: (reduce(tf.zeros([3]), "constant"), x),
        "seeded": lambda x: (
            reduce(tf.random.stateless_normal([3], [1, 2]), "seeded"),
            x,
        ),
    }
    for body in patterns.values():
        function = graph(body)
        for _ in range(CALLS):
            function(values)


def results_of(engine: Engine, pair: Group) -> dict[str, object]:
    """What each collective returns, with inputs that differ by rank."""
    world, rank, size = engine.world, engine.rank, engine.size
    mine = tf.range(2.0 * size) + 10.0 * rank
    halves = tf.cast(mine, tf.bfloat16)
    ids = tf.constant([rank + 1], tf.int64)

    def body(mine, halves, ids):
        return {
            "sum": world.all_reduce(mine, "sum"),
            "max": world.all_reduce(mine + 0.0, "max", "max"),
            "bfloat16_sum": tf.cast(world.all_reduce(halves, "half_sum"), tf.float32),
            "scattered": world.reduce_scatter(mine + 1.0, "scattered"),
            "bfloat16_scattered": tf.cast(
                world.reduce_scatter(halves + 1, "half_scattered"), tf.float32
            ),
            "gathered": world.all_gather(mine[:2] + 2.0, "gathered"),
            "bfloat16_gathered": tf.cast(world.all_gather(halves[:1], "half_gathered"), tf.float32),
            "int64_gathered": world.all_gather(ids, "ids"),
            "broadcast": world.broadcast(mine + 3.0, 1, "broadcast"),
            "bfloat16_broadcast": tf.cast(world.broadcast(halves + 3, 1, "half_b"), tf.float32),
        }

    seen = graph(body)(mine, halves, ids)
    if pair.rank >= 0:
        # Both directions in one call: this rank's row goes to the other member.
        counts = [0, 1] if pair.rank == 0 else [1, 0]
        row = tf.constant([[100.0 + rank, 0.5]])
        seen["exchanged"] = graph(lambda x: pair.exchange(x, counts, "exchange"))(row)
        half = graph(
            lambda x: tf.cast(pair.exchange(tf.cast(x, tf.bfloat16), counts, "half"), tf.float32)
        )
        seen["bfloat16_exchanged"] = half(row)
    return {name: value.numpy().tolist() for name, value in seen.items()}


def opposite_orders_complete(engine: Engine) -> list[float]:
    """Ranks that build two collectives in opposite order: in one function both complete."""
    world = engine.world

    def body(a, b):
        first = lambda: world.all_reduce(a, "order_a")  # noqa: E731
        second = lambda: world.all_reduce(b, "order_b")  # noqa: E731
        if engine.rank % 2:
            b_sum, a_sum = second(), first()
        else:
            a_sum, b_sum = first(), second()
        return tf.stack([a_sum[0], b_sum[0]])

    sums = graph(body)(tf.constant([1.0]), tf.constant([100.0]))
    return sums.numpy().tolist()


def main() -> None:
    output = Path(sys.argv[1])
    os.environ["HOROVOD_TIMELINE"] = str(output / "timeline.json")
    engine = Engine()
    run_patterns(engine.world)
    seen: dict[str, object] = {"opposite": opposite_orders_complete(engine)}
    try:
        engine.world.all_reduce(tf.constant([1.0]), "eager")
        seen["eager"] = "ran"
    except AssertionError as error:
        seen["eager"] = str(error)
    engine.barrier(60)
    engine.close()
    del os.environ["HOROVOD_TIMELINE"]
    # Again and again in the same processes, with other sets each time.
    for round_number in range(4):
        last = engine.size - 1
        groups = [
            ("pair", (round_number % last, last)),
            ("alone", (0,)),
            ("all", range(engine.size)),
        ]
        engine = Engine(groups)
        pair, alone, everyone = engine.groups
        assert everyone.size == engine.size and alone.size == 1
        seen[f"results_{round_number}"] = results_of(engine, pair)
        engine.barrier(60)
        if round_number < 3:
            engine.close()
    # Groups of one rank need no communication, even where others are busy.
    if engine.rank == 0:
        one = graph(lambda x: alone.all_reduce(x, "one"))(tf.constant([5.0]))
        seen["alone"] = one.numpy().tolist()
    seen["agreed"] = [engine.agree(engine.rank + 3, op) for op in ("min", "max", "sum")]
    seen["array"] = engine.broadcast(np.array([engine.rank + 7, 2], np.int64)).tolist()
    # A rank that does not come in time is found.
    engine.barrier(60)
    if engine.rank == engine.size - 1:
        time.sleep(3.0)
    start = time.monotonic()
    try:
        engine.barrier(1.0)
        seen["late"] = "came"
    except TimeoutError as error:
        seen["late"] = str(error)
    seen["waited"] = time.monotonic() - start
    time.sleep(4.0)
    engine.close()
    if engine.rank == 0:
        (output / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
