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


def microbatches(schedule: str) -> Pair:
    """A narrow model, few and many microbatches of one size."""
    model = {**SHAPE, "max_length": 256, "embed_dim": 128, "vocab_size": 64}
    layout = {**P2, **LONG, "pipeline": schedule}
    few, many = ({"microbatches": count, "global_batch": 4 * count} for count in (2, 8))
    return Pair(({**layout, **few}, model), ({**layout, **many}, model))


PAIRS = {
    "p2 by width": widths(P2),
    "t2 by width": widths(T2),
    "p2 simple by microbatches": microbatches("simple"),  # it holds all of a step
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


@pytest.mark.distributed
def test_1f1b_holds_no_more_of_more_microbatches(tmp_path):
    pair = microbatches("1f1b")
    small, large = measure(tmp_path / "small", pair.small), measure(tmp_path / "large", pair.large)
    for rank in range(2):
        each = small[rank]["activation_bytes"] / (2 - rank)  # as many as stages from here on
        assert large[rank]["activation_bytes"] == small[rank]["activation_bytes"]
        grown = large[rank]["peak"] - small[rank]["peak"]
        print(f"rank {rank}: {grown / 1e6:.1f} MB, a microbatch keeps {each / 1e6:.1f} MB")
        assert grown < 0.6 * each, "GPipe's would grow by six"
