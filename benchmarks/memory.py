"""Bytes a parameter and a token under each memory option, as slopes over two models.

usage: python benchmarks/memory.py [--quick] [--ranks=N] [--only=TEXT]

N ranks (2) train a shallow and a deep model under each way of holding state: the difference of what
they hold over the difference of their parameters is what a parameter takes, and a model chosen by
that is then trained within 4 GiB a rank. One process trains a shallow and a deep model under each
way of recomputation, each with a small and a large batch: what a sample takes of the deep one
beyond the shallow, over the difference of their blocks, is what a block keeps.
"""

import argparse
from multiprocessing.pool import ThreadPool
from pathlib import Path
from sys import path
from typing import NamedTuple

path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.held_memory import measure
from tfbig.config import Config, count_parameters, replace_fields
from trainers.activations import block_bytes, head_bytes, whole_block_bytes

BAR = 0.10
LIMIT = 4 << 30


class Option(NamedTuple):
    """A way to hold state, and the bytes a parameter of the table in docs/memory.md.

    A pair is (bytes that each rank holds, bytes of which each rank holds 1/N). Whatever a rank has
    of a few blocks at a time, gathered weights say, does not grow with depth.

    Args:
      fields: of the configuration.
      resting: between steps.
      peak: in a step.
    """

    fields: dict
    resting: tuple[float, float]
    peak: tuple[float, float]


BUCKETS = {"gradient_reduction": "buckets"}
BFLOAT16 = {"precision": "bfloat16"}
OPTIONS = {
    "none": Option(BUCKETS, (12, 0), (16, 0)),
    # Narrow copies of the weights are gone by the time all gradients are there.
    "none, bfloat16": Option(BUCKETS | BFLOAT16, (12, 0), (16, 0)),
    "ZeRO-1": Option({"shard_optimizer_state": True}, (4, 8), (8, 8)),
    # Gradients stay narrow until their bucket is summed.
    "ZeRO-1, bfloat16": Option({"shard_optimizer_state": True} | BFLOAT16, (2, 12), (4, 12)),
    "ZeRO-2": Option({"shard_gradients": True}, (4, 8), (4, 12)),
    "ZeRO-2, bfloat16": Option({"shard_gradients": True} | BFLOAT16, (2, 12), (2, 16)),
    "ZeRO-3": Option({"shard_parameters": True}, (0, 12), (0, 16)),
    "ZeRO-3, bfloat16": Option({"shard_parameters": True} | BFLOAT16, (0, 12), (0, 16)),
}
MODES = ("none", "attention", "block", "group_2")


def state_fields(option: Option, width: int, layers: int, ranks: int) -> dict:
    """Returns the settings of a model whose parameters count: wide blocks, short samples."""
    shape = {"num_layers": layers, "num_heads": 4, "vocab_size": 64, "max_length": 8}
    run = {"sequence_length": 8, "global_batch": ranks, "bucket_megabytes": 4, "num_threads": 1}
    # Horovod's buffer for what it fuses, 128 MiB at most, would look like bytes of parameters.
    run |= {"deterministic": True, "strategy": "horovod"}
    return shape | run | option.fields | {"embed_dim": width}


def report_state(name: str, ranks: int, quick: bool) -> None:
    """Prints bytes a parameter of an option against its formula, and trains what fits 4 GiB."""
    option, depths, width = OPTIONS[name], (2, 4), 1536 if quick else 2048
    if "ZeRO-2" in name or "ZeRO-3" in name:
        depths = (4, 8)  # of fewer blocks those that are under way at a time are a growing share
    small, large = (measure(state_fields(option, width, depth, ranks), ranks) for depth in depths)
    for field, (whole, shared) in (("resting", option.resting), ("peak", option.peak)):
        formula = whole + shared / ranks
        found = (large[field] - small[field]) / (large["parameters"] - small["parameters"])
        what = f"bytes a parameter, {field}; formula {formula:g}"
        print_bar(f"{name}, {ranks} ranks: {what}", formula, found)
    if quick:
        return
    # Of the same depth, as what a rank has of a few blocks at a time is a share of it.
    each = large["peak"] / large["parameters"]
    layers = depths[1]
    fits = 0.95 * (LIMIT - large["before"]) / each
    saw = measure(state_fields(option, widest(option, layers, ranks, fits), layers, ranks), ranks)
    total = (saw["before"] + saw["peak"]) / 2**30
    print(
        f"{name}, {ranks} ranks: {saw['parameters'] / 1e6:.0f} M parameters train in 4 GiB a rank |"
        f" at most 4 GiB | {total:.2f} | {'yes' if total <= LIMIT / 2**30 else 'no'}",
        flush=True,
    )


def widest(option: Option, layers: int, ranks: int, parameters: float) -> int:
    """Returns the width, a multiple of 16, of the largest model with at most `parameters`."""
    width = 16
    while True:
        config = replace_fields(Config(), state_fields(option, width + 16, layers, ranks))
        if count_parameters(config.model) > parameters:
            return width
        width += 16


def activation_fields(mode: str, layers: int, rows: int, length: int) -> dict:
    """Returns the settings of a model whose activations count: narrow, long samples."""
    shape = {"num_layers": layers, "embed_dim": 256, "num_heads": 4, "vocab_size": 64}
    run = {"sequence_length": length, "max_length": length, "num_threads": 1}
    run |= {"strategy": "single", "attention": "plain", "global_batch": rows}
    return shape | run | {"activation_checkpointing": mode}


def report_activations(mode: str, quick: bool) -> None:
    """Prints what a block and a sample keep, against what trainers/activations.py counts."""
    length, batches, depths = (128, (8, 48), (2, 6)) if quick else (256, (8, 48), (4, 12))
    cases = [activation_fields(mode, layers, rows, length) for layers in depths for rows in batches]
    with ThreadPool(2) as pool:  # of processes apart, which a busy machine only makes slower
        peaks = [saw["peak"] for saw in pool.map(lambda fields: measure(fields, 1), cases)]
    # Bytes that one more sample takes, of the shallow model and of the deep one.
    rows = batches[1] - batches[0]
    samples = [(peaks[1] - peaks[0]) / rows, (peaks[3] - peaks[2]) / rows]
    config = replace_fields(Config(), activation_fields(mode, depths[1], 1, length))
    formula = block_bytes(config, 1, mode)
    found = (samples[1] - samples[0]) / (depths[1] - depths[0])
    print_bar(
        f"activations, {mode}: MB a block and sample; formula {formula / 1e6:.3f}",
        formula / 1e6,
        found / 1e6,
        digits=3,
    )
    whole = depths[1] * formula + head_bytes(config, 1)
    if mode != "none":
        whole += whole_block_bytes(config, 1)  # the one that is made again
    print(f"activations, {mode}: {samples[1] / 1e6:.2f} MB a sample; counted {whole / 1e6:.2f}")


def print_bar(name: str, formula: float, found: float, digits: int = 2) -> None:
    """Prints whether what was found is within a tenth of its formula."""
    met = "yes" if abs(found / formula - 1) <= BAR else "no"
    print(f"{name} | within {BAR:.0%} | {found:.{digits}f} | {met}", flush=True)


def main() -> None:
    """Runs both parts and prints one line a bar."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default="", help="what has this text in its name")
    arguments = parser.parse_args()
    options = ["ZeRO-1"] if arguments.quick else list(OPTIONS)
    if arguments.ranks != 2:  # of other numbers what nobody shares is the same
        options = [name for name in options if "ZeRO" in name]
    for name in options:
        if arguments.only in name:
            report_state(name, arguments.ranks, arguments.quick)
    for mode in ["block"] if arguments.quick else MODES:
        if arguments.only in f"activations, {mode}":
            report_activations(mode, arguments.quick)


if __name__ == "__main__":
    main()
