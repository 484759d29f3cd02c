"""A rank's memory grows with the model and with what is in flight as the partition says it does.

Each measurement is a launch of its own: what an earlier trainer leaves behind would be taken for
free. glibc is told to hand larger blocks back at once, so that a peak is of what was held.
"""

import json
from typing import NamedTuple

import pytest

from tests.distributed.launch import horovodrun
from tfbig.config import ModelConfig, count_parameters

WORKER = "tests/distributed/memory_worker.py"
HANDS_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
# Horovod's buffer for what it fuses would look like bytes of the model.
ENVIRONMENT = HANDS_BACK | {"HOROVOD_FUSION_THRESHOLD": "0"}
SHAPE = {"num_layers": 4, "num_heads": 8, "vocab_size": 512, "tied_head": False, "dropout": 0.0}
PIPELINE = {"strategy": "pipeline", "num_threads": 1, "learning_rate": 1e-3}
P2 = {**PIPELINE, "pipeline_parallel_degree": 2}
T2 = {**PIPELINE, "tensor_parallel_degree": 2}
SHORT = {"sequence_length": 16, "global_batch": 4, "microbatches": 4}
LONG = {"sequence_length": 256, "attention": "plain"}


class Pair(NamedTuple):
    """Two cases of one layout; each is (fields, model)."""

    small: tuple[dict, dict]
    large: tuple[dict, dict]


def widths(layout: dict) -> Pair:
    """Two widths whose weights, gradients and slots are nearly all that differs."""
    model = {**SHAPE, "max_length": 16}
    small, large = (({**layout, **SHORT}, {**model, "embed_dim": width}) for width in (256, 1024))
    return Pair(small, large)


def batches(layout: dict, small: dict, large: dict) -> Pair:
    """One narrow model, two amounts of activations at once."""
    model = {**SHAPE, "max_length": 256, "embed_dim": 128, "vocab_size": 64}
    return Pair(({**layout, **LONG, **small}, model), ({**layout, **LONG, **large}, model))


PAIRS = {
    "p2 by width": widths(P2),
    "t2 by width": widths(T2),
    # GPipe holds every microbatch of a step, 1F1B as many as there are stages from here on.
    "p2 simple by microbatches": batches(
        {**P2, "pipeline": "simple"},
        {"microbatches": 2, "global_batch": 8},
        {"microbatches": 8, "global_batch": 32},
    ),
    "p2 1f1b by rows": batches(
        P2, {"microbatches": 4, "global_batch": 8}, {"microbatches": 4, "global_batch": 48}
    ),
    "t2 by rows": batches(
        T2, {"microbatches": 1, "global_batch": 4}, {"microbatches": 1, "global_batch": 24}
    ),
}


def measure(folder, case: tuple[dict, dict]) -> list[dict]:
    """Returns what each of two ranks measured."""
    fields, model = case
    cases = json.dumps([{"name": "case", "fields": fields, "model": model}])
    folder.mkdir()
    done = horovodrun(2, [WORKER, str(folder), cases], 300, ENVIRONMENT)
    assert done.returncode == 0, done.stdout
    return [json.loads((folder / f"case_{rank}.json").read_text()) for rank in range(2)]


def parameters(case: tuple[dict, dict]) -> int:
    """Returns those of the whole model."""
    return count_parameters(ModelConfig(**case[1]))


@pytest.mark.distributed
@pytest.mark.parametrize("name", PAIRS)
def test_memory_grows_by_the_formula(name, tmp_path):
    pair = PAIRS[name]
    small, large = measure(tmp_path / "small", pair.small), measure(tmp_path / "large", pair.large)
    whole = parameters(pair.large) - parameters(pair.small)
    for rank in range(2):
        grown = {field: large[rank][field] - small[rank][field] for field in large[rank]}
        formula = grown["state_bytes"] + grown["activation_bytes"]
        ratio = grown["peak"] / formula
        print(f"{name}, rank {rank}: {grown['peak'] / 1e6:.1f} of {formula / 1e6:.1f} MB")
        assert formula > 40e6, "too little to measure"
        assert grown["num_parameters"] == pytest.approx(whole / 2, rel=0.03), "not 1/p, not 1/t"
        assert abs(ratio - 1) < 0.1, f"rank {rank} grew by {ratio:.2f} of the formula"
