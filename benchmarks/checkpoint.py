"""What saving costs a training step: asynchronous against synchronous, GPT-2 124M with AdamW.

usage: python -m benchmarks.checkpoint [--quick] [FOLDER]

FOLDER is where the checkpoints go (default: a temporary one); it needs 5 GB. --quick takes a
model a tenth as large.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tfbig.command import quiet_tensorflow

quiet_tensorflow()

import numpy as np  # noqa: E402

import trainers  # noqa: E402
from tfbig import train  # noqa: E402
from tfbig.checkpoint_format import num_bytes_to_write  # noqa: E402
from tfbig.loop import Progress  # noqa: E402
from tfbig.run_folder import RunFolder  # noqa: E402
from tfbig.run_state import StateKeeper  # noqa: E402

LENGTH = 32
BAR = 0.05


def one_step(trainer: Any, step: int) -> float:
    """Trains one step on random tokens; returns its seconds."""
    import tensorflow as tf

    start = time.perf_counter()
    batch = {
        "tokens": tf.constant(
            np.random.default_rng(step).integers(0, 1000, (1, LENGTH + 1)), tf.int32
        ),
        "sample_index": tf.constant([step], tf.int64),
        "source_index": tf.constant([0], tf.int32),
        "loss_mask": tf.ones([1, LENGTH], tf.uint8),
    }
    trainer.train_step(batch, step, 1e-4, 0.0, 0).loss_sum.numpy()
    return time.perf_counter() - start


def keeper_of(folder: Path, trainer: Any, config: Any, is_async: bool) -> StateKeeper:
    config = train.replace_fields(config, {"async_checkpoints": is_async, "keep_last": 1})
    run = RunFolder(folder / ("async" if is_async else "sync"))
    run.create()
    return StateKeeper(config, run, trainer, lambda consumed_samples: {})


def measure(folder: Path, preset: dict[str, Any], num_saves: int, num_steps: int) -> dict:
    """Returns seconds, a save each: synchronous, waited for when asynchronous, of slower steps."""
    config = train.config_from({**preset, "global_batch": 1})
    trainer = trainers.trainer_class("single")(config)
    trainer.build()
    size = num_bytes_to_write(trainer.state_slices())
    step = 0
    for _ in range(3):
        one_step(trainer, step)
        step += 1
    found: dict[str, Any] = {"bytes": size}
    found |= {name: [] for name in ("sync", "copy", "slowed", "sync cpu", "copy cpu")}
    with keeper_of(folder, trainer, config, False) as keeper:
        for _ in range(num_saves):
            start, cpu = time.perf_counter(), time.thread_time()
            keeper.save(Progress(step, step), {})
            found["sync"].append(time.perf_counter() - start)
            found["sync cpu"].append(time.thread_time() - cpu)
            one_step(trainer, step)
            step += 1
    with keeper_of(folder, trainer, config, True) as keeper:
        for number in range(num_saves + 1):
            plain = statistics.median(one_step(trainer, step + i) for i in range(num_steps))
            step += num_steps
            start, cpu = time.perf_counter(), time.thread_time()
            keeper.save(Progress(step, step), {})
            copy, cpu = time.perf_counter() - start, time.thread_time() - cpu
            slowed = 0.0
            while not keeper.finished():
                slowed += one_step(trainer, step) - plain
                step += 1
            if number:  # the first one also takes its memory from the system
                found["copy"].append(copy)
                found["copy cpu"].append(cpu)
                found["slowed"].append(slowed)
            else:
                found["first copy"] = copy
    trainer.close()
    return found


def main() -> None:
    """Prints the measurements, then the bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    if given.folder:
        Path(given.folder).mkdir(parents=True, exist_ok=True)
    preset: dict[str, Any] = {"preset": "gpt2_124m", "sequence_length": LENGTH}
    if given.quick:
        preset |= {"embed_dim": 256, "num_heads": 4, "num_layers": 2}
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        found = measure(Path(folder), preset, 3, 3)
    sync, copy, slowed = (statistics.median(found[name]) for name in ("sync", "copy", "slowed"))
    print(f"state {found['bytes'] / 1e9:.2f} GB")
    print(f"synchronous save: the step waits {sync:.2f} s (of {found['sync']})")
    print(f"asynchronous save: the step waits {copy:.3f} s (of {found['copy']})")
    print(f"first asynchronous save, which also takes the memory: {found['first copy']:.3f} s")
    print(f"steps beside the writing thread take {slowed:.2f} s longer in all: it shares the cores")
    cpu = [statistics.median(found[name]) for name in ("sync cpu", "copy cpu")]
    print(f"processor time of the training thread: {cpu[0]:.3f} s and {cpu[1]:.4f} s")
    # The wait alone is not all: the writing thread takes cores from the steps beside it.
    for title, lost in (
        ("a step's wait for an asynchronous save", copy),
        ("what training loses to it, slower steps included", copy + slowed),
    ):
        share = lost / sync
        print(
            f"{title} | {BAR:.0%} of the synchronous one | "
            f"{share:.1%} ({lost:.3f} of {sync:.2f} s) | {'yes' if share <= BAR else 'no'}"
        )


if __name__ == "__main__":
    main()
