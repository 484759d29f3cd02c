"""Bytes a parameter and a token under each memory option, as slopes over two models.

usage: python benchmarks/memory.py [--quick]

Two ranks train a narrow and a wide model under each option; the difference of their peaks over the
difference of their parameters is what a parameter takes. Peaks are Linux's VmHWM with glibc told to
hand every larger block back at once, so that they are of what is held, not of what was. Each model
is trained by processes of its own, behind a small one that pays for what a process makes once: what
an earlier model left behind would be reused, and missing from the count.
"""

import gc
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
RANKS, BAR = 2, 0.10
LIMIT = 4 << 30
HANDS_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


class Option(NamedTuple):
    """What is measured, and the bytes a parameter that docs/memory.md says it takes.

    Of units that are gathered, or whose gradients have not left yet, a deep model has a small part
    at a time; of these few blocks it is added.
    """

    fields: dict
    resting: float  # between steps
    peak: float  # in a step


HOROVOD = {"strategy": "horovod", "gradient_reduction": "buckets"}
SHARED = {"strategy": "horovod"}
LAYERS = 4
UNIT = 4 / LAYERS  # bytes a parameter of one block's weights, or gradients
OPTIONS = {
    "none": Option(HOROVOD, 12, 16),
    "ZeRO-1": Option({**SHARED, "shard_optimizer_state": True}, 4 + 8 / RANKS, 8 + 8 / RANKS),
    # A block's gradients, and flat once more.
    "ZeRO-2": Option({**SHARED, "shard_gradients": True}, 4 + 8 / RANKS, 4 + 12 / RANKS + 2 * UNIT),
    # Two blocks' weights, a block's gradients, and flat once more.
    "ZeRO-3": Option({**SHARED, "shard_parameters": True}, 12 / RANKS, 16 / RANKS + 4 * UNIT),
    "ZeRO-1, bfloat16": Option(
        {**SHARED, "shard_optimizer_state": True, "precision": "bfloat16"},
        2 + 12 / RANKS,
        2 + 4 + 12 / RANKS,
    ),
}


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
        return _status_bytes("VmRSS")

    def peak(self) -> int:
        """Returns the most bytes held since `reset`."""
        return (
            self._config.get_memory_info("GPU:0")["peak"]
            if self._on_gpu
            else _status_bytes("VmHWM")
        )

    def reset(self) -> None:
        """Sets the peak to what is held now."""
        gc.collect()
        if self._on_gpu:
            self._config.reset_memory_stats("GPU:0")
        else:
            Path("/proc/self/clear_refs").write_text("5")


def _status_bytes(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+) kB", text)[1]) * 1024


def measure(cases: list[dict]) -> None:
    """Trains each case for some steps; rank 0 prints what the last one held, as JSON."""
    import trainers
    from tfbig.config import Config, count_parameters, replace_fields

    for case in cases:
        config = replace_fields(Config(), case["fields"])
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
        saw = {
            "name": case["name"],
            "parameters": count_parameters(config.model),
            "rows": config.run.global_batch,
            "before": before,
            "resting": resting - before,
            "peak": held.peak() - before,
        }
        trainer.barrier(600)
        if trainer.rank == 0 and case is cases[-1]:
            print("result " + json.dumps(saw), flush=True)
        trainer.close()
        del trainer, batch


def make_batch(config, rows: int) -> dict:
    """Returns a batch of random tokens."""
    import numpy as np
    import tensorflow as tf

    length, vocab_size = config.data.sequence_length, config.model.vocab_size
    tokens = np.random.default_rng(0).integers(0, vocab_size, (rows, length + 1), np.int32)
    return {
        "tokens": tf.constant(tokens),
        "sample_index": tf.range(rows, dtype=tf.int64),
        "source_index": tf.zeros([rows], tf.int32),
        "loss_mask": tf.ones([rows, length], tf.uint8),
    }


def state_cases(quick: bool) -> list[dict]:
    """Returns the cases whose parameters count: short samples, two widths.

    The graph of a step, which takes a dozen megabytes a block, is as large for both.
    """
    widths = (256, 768) if quick else (512, 1536)
    shape = {"num_layers": LAYERS, "num_heads": 4, "vocab_size": 64, "max_length": 8}
    run = {"sequence_length": 8, "global_batch": RANKS, "bucket_megabytes": 4, "num_threads": 1}
    # Horovod's buffer for what it fuses, 128 MiB at most, would look like 4 bytes a parameter.
    run["deterministic"] = True
    return [
        {"name": name, "fields": {**shape, **run, **OPTIONS[name].fields, "embed_dim": width}}
        for name in (["ZeRO-1"] if quick else OPTIONS)
        for width in widths
    ]


def activation_cases(quick: bool) -> list[dict]:
    """Returns the cases whose activations count: a narrow model, two sizes of batch."""
    length, batches = (128, (4, 24)) if quick else (256, (8, 48))
    shape = {"num_layers": 6, "embed_dim": 128, "num_heads": 4, "vocab_size": 64}
    run = {"sequence_length": length, "max_length": length, "num_threads": 1}
    run |= {"strategy": "single", "attention": "plain"}
    return [
        {
            "name": mode,
            "fields": {**shape, **run, "activation_checkpointing": mode, "global_batch": rows},
        }
        for mode in (["block"] if quick else ["none", "block"])
        for rows in batches
    ]


def warm_up(case: dict) -> dict:
    """Returns a case that a process runs before another."""
    small = {"embed_dim": 64, "num_layers": 1, "activation_checkpointing": "none"}
    return {"name": "warm-up", "fields": {**case["fields"], **small}}


def launch(num_processes: int, part: str, quick: bool) -> list[dict]:
    """Returns, for each case of a part, what rank 0 of a launch of its own prints."""
    results = []
    for index in range(len(CASES[part](quick))):
        command = [sys.executable, __file__, "--worker", part, str(index)]
        command += ["--quick"] if quick else []
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
        results.append(json.loads(lines[0][lines[0].index("{") :]))
    return results


def pairs(results: list[dict]) -> dict[str, tuple[dict, dict]]:
    """Returns each option's small and large case."""
    names = dict.fromkeys(result["name"] for result in results)
    by_name = {name: [one for one in results if one["name"] == name] for name in names}
    return {name: (small, large) for name, (small, large) in by_name.items()}


def slope(small: dict, large: dict, field: str, over: str) -> float:
    """Returns the growth of a measure for each unit of another."""
    return (large[field] - small[field]) / (large[over] - small[over])


def report_state(results: list[dict]) -> None:
    """Prints bytes a parameter, each against its formula, and what fits 4 GiB a rank."""
    for name, (small, large) in pairs(results).items():
        option = OPTIONS[name]
        for field, formula in (("resting", option.resting), ("peak", option.peak)):
            found = slope(small, large, field, "parameters")
            met = "yes" if abs(found / formula - 1) <= BAR else "no"
            print(
                f"{name}, {RANKS} ranks: bytes a parameter, {field}; formula {formula:g} |"
                f" within {BAR:.0%} | {found:.2f} | {met}"
            )
        each = slope(small, large, "peak", "parameters")
        process = small["before"]  # TensorFlow, Horovod and what a first trainer leaves
        fits = (LIMIT - process - small["peak"]) / each + small["parameters"]
        print(f"{name}: the largest model in 4 GiB a rank, by that line: {fits / 1e6:,.0f} M")


def report_activations(results: list[dict], quick: bool) -> None:
    """Prints what a sample's activations take, against what trainers/activations.py counts."""
    from tfbig.config import Config, replace_fields
    from trainers.activations import block_bytes, head_bytes, whole_block_bytes

    fields = {case["name"]: case["fields"] for case in activation_cases(quick)}
    for name, (small, large) in pairs(results).items():
        config = replace_fields(Config(), fields[name])
        formula = config.model.num_layers * block_bytes(config, 1, name) + head_bytes(config, 1)
        if name != "none":
            formula += whole_block_bytes(config, 1)  # the one that is made again
        found = slope(small, large, "peak", "rows")
        met = "yes" if abs(found / formula - 1) <= BAR else "no"
        print(
            f"activations, --activation_checkpointing={name}: MB a sample; formula"
            f" {formula / 1e6:.2f} | within {BAR:.0%} | {found / 1e6:.2f} | {met}"
        )


CASES = {"state": state_cases, "activations": activation_cases}


def main() -> None:
    """Runs both parts and prints one line a bar."""
    quick = "--quick" in sys.argv
    if "--worker" in sys.argv:
        from tfbig.command import quiet_tensorflow

        quiet_tensorflow()
        part, index = sys.argv[sys.argv.index("--worker") + 1 :][:2]
        case = CASES[part](quick)[int(index)]
        measure([warm_up(case), case])
        return
    report_state(launch(RANKS, "state", quick))
    report_activations(launch(1, "activations", quick), quick)


if __name__ == "__main__":
    main()
