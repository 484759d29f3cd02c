"""What batches cost, in a process of its own that has one core: prints JSON.

usage: python -m benchmarks.data_feeding DATA_FOLDER BATCH MIN_STEPS
"""

import json
import os
import sys
import time
from pathlib import Path

POSITIONS = (0, 10**6 + 7, 10**11 + 13)  # samples at which a run may resume


def anonymous_megabytes() -> float:
    """Returns this process's RssAnon."""
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) / 1024


def main() -> None:
    """Measures resuming, an epoch and more of batches, and TensorFlow's own floor."""
    folder, batch, min_steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    from data_pipeline.dataset import TokenData

    next(iter(tf.data.Dataset.range(1).prefetch(1)))
    alone = anonymous_megabytes()
    data = TokenData.open(folder)
    epoch = data.num_rows("train")
    steps = max(min_steps, 2 * epoch // batch)
    resumed = []
    for position in POSITIONS:
        start = time.perf_counter()
        next(iter(data.train_batches(position, steps, batch)))
        resumed.append(time.perf_counter() - start)
    warm_up = steps // 10
    batches = iter(data.train_batches(0, steps, batch))
    for _ in range(warm_up):
        next(batches)
    memory, cpu, wall = [anonymous_megabytes()], time.process_time(), time.perf_counter()
    for step in range(steps - warm_up):
        next(batches)
        if step % (steps // 8) == 0:
            memory.append(anonymous_megabytes())
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    tokens = batch * data.sequence_length / 1e6
    one = next(iter(data.train_batches(0, 1, batch)))
    start = time.process_time()
    for _ in tf.data.Dataset.from_tensors(one).repeat(steps).prefetch(4):
        pass
    floor = time.process_time() - start
    result = {
        "epochs": steps * batch / epoch,
        "rate": (steps - warm_up) * tokens / cpu,
        "rate_wall": (steps - warm_up) * tokens / wall,
        "floor": steps * tokens / floor,
        "resume": resumed,
        "alone": alone,
        "above": [m - alone for m in memory],
    }
    print("result " + json.dumps(result))


if __name__ == "__main__":
    main()
