"""Runs in two processes under horovodrun: bandwidth and latency of their all-reduce, as JSON."""

import json
import time


def main() -> None:
    """Prints, on rank 0, what an all-reduce of few and of many bytes takes."""
    from tfbig.command import quiet_tensorflow

    quiet_tensorflow()
    import tensorflow as tf

    from trainers.collectives import Engine

    engine = Engine()

    def seconds(elements: int, repeats: int) -> float:
        x = tf.ones([elements])
        run = tf.function(lambda a: engine.world.all_reduce(a, f"link_{elements}"), autograph=False)
        run(x)
        start = time.perf_counter()
        for _ in range(repeats):
            run(x).numpy()
        return (time.perf_counter() - start) / repeats

    small, large = seconds(16, 50), seconds(1 << 22, 8)
    if engine.rank == 0:
        # Two ranks: an all-reduce is two trips, and moves every byte once.
        bandwidth = 4.0 * (1 << 22) / max(1e-9, large - small)
        print(json.dumps({"bandwidth": bandwidth, "latency": small / 2}), flush=True)
    engine.barrier(60)
    engine.close()


if __name__ == "__main__":
    main()
