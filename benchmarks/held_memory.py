"""What a process holds while it trains: each model in processes of its own.

Peaks are Linux's VmHWM with glibc told to hand every larger block back at once, so that they are of
what is held, not of what was. A small model before the one that is measured pays for what a process
makes once: what an earlier model left behind would be reused, and missing from the count.
"""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tfbig.planner.measure_steps import make_batch, reset_peak, resident

ROOT = Path(__file__).parents[1]
HANDS_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


class Held:
    """What this process holds: of its GPU if it has one, else resident memory."""

    def __init__(self) -> None:
        import tensorflow as tf

        self._config = tf.config.experimental
        self._on_gpu = bool(tf.config.get_visible_devices("GPU"))

    def now(self) -> int:
        """Returns bytes held now."""
        gc.collect()
        if self._on_gpu:
            return self._config.get_memory_info("GPU:0")["current"]
        return resident("VmRSS")

    def peak(self) -> int:
        """Returns the most bytes held since `reset`."""
        return self._config.get_memory_info("GPU:0")["peak"] if self._on_gpu else resident()

    def reset(self) -> None:
        """Sets the peak to what is held now."""
        gc.collect()
        if self._on_gpu:
            self._config.reset_memory_stats("GPU:0")
        else:
            reset_peak()


def train(fields: dict) -> dict:
    """Returns the bytes that a trainer of these settings holds, between steps and at most.

    Args:
      fields: of the configuration.

    Returns:
      parameters; before: bytes held before the trainer was made; resting and peak: beyond those.
    """
    import trainers
    from tfbig.config import Config, count_parameters, replace_fields

    config = replace_fields(Config(), fields)
    held = Held()
    before = held.now()
    trainer = trainers.trainer_class(config.parallel.strategy)(config)
    trainer.build()
    batch = make_batch(config, config.run.global_batch // trainer.data_size)
    trainer.train_step(batch, 0, 1e-3, 0.0, 0).loss_sum.numpy()  # traces
    resting = held.now()
    held.reset()
    for step in range(1, 3):
        trainer.train_step(batch, step, 1e-3, 0.0, 0).loss_sum.numpy()
    saw = {"parameters": count_parameters(config.model), "before": before, "rank": trainer.rank}
    saw |= {"resting": resting - before, "peak": held.peak() - before}
    trainer.barrier(600)
    trainer.close()
    return saw


def measure(fields: dict, num_processes: int) -> dict:
    """Returns what the first of some new processes holds while they train; see `train`."""
    command = [sys.executable, __file__, json.dumps(fields)]
    if num_processes > 1:
        horovodrun = str(Path(sys.executable).with_name("horovodrun"))
        command = [horovodrun, "-np", str(num_processes), *command]
    settings = {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"} | HANDS_BACK
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=1000, env=os.environ | settings
    )
    lines = [line for line in done.stdout.splitlines() if "result {" in line]
    if done.returncode or not lines:
        sys.exit(f"the processes failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return json.loads(lines[0][lines[0].index("{") :])


def main() -> None:
    """Trains a small model, then the one asked for; rank 0 prints what that held, as JSON."""
    from tfbig.command import quiet_tensorflow

    quiet_tensorflow()
    fields = json.loads(sys.argv[1])
    train(fields | {"embed_dim": 64, "num_layers": 1, "activation_checkpointing": "none"})
    saw = train(fields)
    if saw["rank"] == 0:
        print("result " + json.dumps(saw), flush=True)


if __name__ == "__main__":
    main()
