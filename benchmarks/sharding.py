"""What sharding and recomputation cost: step times beside those without, turn and turn about.

usage: python benchmarks/sharding.py [--quick]

Two ranks (one, on a machine with one GPU) make steps of each trainer in turn, in the same
processes, so that whatever else the machine does falls on all of them. On a GPU the copies that
offloading makes are timed alone, too: what of them does not lengthen the step ran beside it.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
# One process a GPU; two on a machine without any.
RANKS = min(2, len(list(Path("/proc/driver/nvidia/gpus").glob("*"))) or 2)
# name: (fields beside --strategy=horovod, the time of what, bar)
CASES = {
    "ZeRO-1": ({"shard_optimizer_state": True}, "plain", 1.1),
    "ZeRO-1, slots on the host": (
        {"shard_optimizer_state": True, "offload_optimizer_state": True},
        "plain",
        None,
    ),
    "ZeRO-2": ({"shard_gradients": True}, "plain", None),
    "ZeRO-3": ({"shard_parameters": True}, "plain", None),
    "block recomputation": ({"activation_checkpointing": "block"}, "plain", 1.25),
    "attention recomputation": ({"activation_checkpointing": "attention"}, "plain", None),
    "offloaded activations": (
        {"activation_checkpointing": "block", "offload_activations": True},
        "block recomputation",
        None,
    ),
    "offloaded activations, no prefetch": (
        {
            "activation_checkpointing": "block",
            "offload_activations": True,
            "activation_loading_horizon": 0,
        },
        "block recomputation",
        None,
    ),
}
HIDDEN = 0.8  # of the copies of offloaded activations, on a GPU
SHAPES = {
    "quick": {"embed_dim": 64, "num_layers": 2, "max_length": 32},
    "full": {"embed_dim": 256, "num_layers": 6, "max_length": 128},
    "gpu": {"embed_dim": 1024, "num_layers": 12, "max_length": 1024},
}


def worker(quick: bool) -> None:
    """Times every case in one process of the launch; rank 0 prints medians as JSON."""
    from tfbig.command import quiet_tensorflow

    quiet_tensorflow()
    import tensorflow as tf

    from tfbig.planner.measure_steps import make_batch
    from tfbig.train import config_from
    from trainers.by_sharding import horovod_trainer

    gpu = bool(tf.config.list_physical_devices("GPU")) and not quick
    shape = SHAPES["quick" if quick else "gpu" if gpu else "full"]
    rows, rounds = (4, 3) if quick else (8, 15)
    base = {"strategy": "horovod", "num_heads": 4, "attention": "plain", "num_threads": 1, **shape}
    base |= {"global_batch": rows * RANKS, "sequence_length": shape["max_length"]}
    batch = make_batch(config_from(base), rows)
    made = {"plain": horovod_trainer(config_from(base))}
    for name, (fields, _, _) in CASES.items():
        made[name] = horovod_trainer(config_from({**base, **fields}))
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for trainer in made.values():
        trainer.build()
    first = made["plain"]
    for step in range(rounds + 2):
        for name, trainer in made.items():
            first.barrier(600)
            start = time.perf_counter()
            trainer.train_step(batch, step, 1e-3, 0.0, 0).loss_sum.numpy()
            if step >= 2:  # the first ones trace
                seconds[name].append(time.perf_counter() - start)
    if first.rank == 0:
        result = {name: statistics.median(own) for name, own in seconds.items()}
        if gpu:
            result["copies"] = copy_seconds(
                shape["num_layers"], (rows, shape["max_length"], shape["embed_dim"])
            )
        print("result " + json.dumps(result), flush=True)
    first.barrier(600)
    first.close()


def copy_seconds(num_blocks: int, shape: tuple[int, int, int]) -> float:
    """Returns the seconds of a step's copies to host memory and back, nothing beside them.

    Args:
      num_blocks: whose inputs are copied.
      shape: of an input, (B, T, D), float32.
    """
    import tensorflow as tf

    with tf.device("/GPU:0"):
        inputs = [tf.random.normal(shape) for _ in range(num_blocks)]
    tf.test.experimental.sync_devices()
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        on_host = [one.cpu() for one in inputs]
        back = [one.gpu() for one in on_host]
        tf.test.experimental.sync_devices()
        seconds.append(time.perf_counter() - start)
        del on_host, back
    return statistics.median(seconds)


def main() -> None:
    """Starts the processes and prints one line a bar."""
    quick = "--quick" in sys.argv
    if "--worker" in sys.argv:
        worker(quick)
        return
    command = [
        str(Path(sys.executable).with_name("horovodrun")),
        *("-np", str(RANKS), sys.executable, __file__, "--worker"),
        *(["--quick"] if quick else []),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000, env=environment)
    lines = [line for line in done.stdout.splitlines() if "result {" in line]
    if done.returncode or not lines:
        sys.exit(f"the benchmark's processes failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    times = json.loads(lines[0][lines[0].index("{") :])
    copies = times.pop("copies", None)
    for name, median in times.items():
        print(f"{name}: median step {median * 1e3:.1f} ms")
    for name, (_, other, bar) in CASES.items():
        ratio = times[name] / times[other]
        if bar is None:
            print(f"{name} / {other}, median step: {ratio:.2f}")
        else:
            met = "yes" if ratio <= bar else "no"
            print(f"{name} / {other}, median step | at most {bar} | {ratio:.2f} | {met}")
    bar = f"copies of offloaded activations hidden behind the step | at least {HIDDEN}"
    if copies is None:
        print(f"{bar} | no GPU | skipped")
        return
    hidden = 1 - (times["offloaded activations"] - times["block recomputation"]) / copies
    print(f"{bar} | {hidden:.2f} | {'yes' if hidden >= HIDDEN else 'no'}")


if __name__ == "__main__":
    main()
