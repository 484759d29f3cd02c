"""What a rank holds grows with the model and the batch as the partition says it does."""

import json
from pathlib import Path

import pytest

from tests.distributed.launch import horovodrun

WORKER = "tests/distributed/memory_worker.py"
ALLOWED = 0.1  # of the formula's slope
LAYOUTS = {
    "p2": {"pipeline_parallel_degree": 2, "partition": "2,2"},
    "t2": {"tensor_parallel_degree": 2},
}
SMALL = {"embed_dim": 256, "num_layers": 4, "num_heads": 4, "vocab_size": 512, "max_length": 512}
SIZES = {
    # size: (fields of the model, rows of a microbatch)
    "small": (SMALL, 1),
    "wide": (SMALL | {"embed_dim": 1024}, 1),
    "many_rows": (SMALL, 5),
}
MICROBATCHES = 4


def measure(folder: Path, layout: str, size: str) -> list[dict]:
    """Returns what each of two fresh processes saw; another case's peak would hide this one's."""
    model, rows = SIZES[size]
    fields = {
        "strategy": "pipeline",
        "global_batch": MICROBATCHES * rows,
        "microbatches": MICROBATCHES,
        "sequence_length": model["max_length"],
        "num_threads": 1,
        **LAYOUTS[layout],
    }
    case = {"name": f"{layout}_{size}", "fields": fields, "model": model}
    done = horovodrun(2, [WORKER, str(folder), json.dumps([case])], timeout=300)
    assert done.returncode == 0, done.stdout
    return [json.loads((folder / f"{case['name']}_{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_grows_as_the_formula_says(tmp_path, layout):
    seen = {size: measure(tmp_path, layout, size) for size in SIZES}
    for rank in (0, 1):
        small = seen["small"][rank]
        for size, part in (("wide", "state_bytes"), ("many_rows", "activation_bytes")):
            large = seen[size][rank]
            formula = sum(large[p] - small[p] for p in ("state_bytes", "activation_bytes"))
            assert large[part] - small[part] > 0.7 * formula, "mostly this part grew"
            measured = large["peak"] - small["peak"]
            print(f"{layout}, rank {rank}, {size}: {measured / formula:.3f} of the formula's slope")
            assert measured == pytest.approx(formula, rel=ALLOWED)
