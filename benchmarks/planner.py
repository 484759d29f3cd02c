"""Predictions of this machine against it: memory of ten layouts, step time of five.

usage: python benchmarks/planner.py [--quick]

Measures the machine first, as `tfbig plan --measure` does, into a file of its own. The machine
should do nothing else meanwhile. --quick takes two layouts of one process.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from tfbig.planner.layout import make_plan
from tfbig.planner.measure import measure_to, run_shapes
from tfbig.planner.question import request_of

MEMORY_BAR, TIME_BAR = 0.10, 0.20
STATE = {"embed_dim": 1024, "num_layers": 4, "num_heads": 8, "vocab_size": 1024, "max_length": 64}
ACTIVATIONS = {
    "embed_dim": 128,
    "num_layers": 8,
    "num_heads": 8,
    "vocab_size": 1024,
    "max_length": 512,
}
MIXED = {"embed_dim": 512, "num_layers": 4, "num_heads": 8, "vocab_size": 8192, "max_length": 128}


def layout(model: dict[str, int], rows: int, processes: int = 1, **fields: Any) -> dict[str, Any]:
    """Returns a layout as a shape of tfbig/planner/measure_steps.py, with its processes."""
    values = {"sequence_length": model["max_length"], "global_batch": rows, "strategy": "single"}
    return {"model": model, "fields": values | fields, "processes": processes}


def meshes(pipeline: int, tensor: int, **fields: Any) -> dict[str, Any]:
    """Returns the fields of a mesh."""
    return {
        "strategy": "pipeline",
        "pipeline_parallel_degree": pipeline,
        "tensor_parallel_degree": tensor,
        **fields,
    }


MEMORY_LAYOUTS = {
    "single, state": layout(STATE, 1),
    "single, activations": layout(ACTIVATIONS, 4),
    "single, 4 microbatches": layout(ACTIVATIONS, 8, microbatches=4),
    "horovod 2, state": layout(STATE, 2, 2, strategy="horovod"),
    "horovod 2, activations": layout(ACTIVATIONS, 4, 2, strategy="horovod"),
    "pipeline 2, state": layout(STATE, 2, 2, **meshes(2, 1, microbatches=2)),
    "pipeline 2, activations": layout(ACTIVATIONS, 4, 2, **meshes(2, 1, microbatches=4)),
    "tensor 2, state": layout(STATE, 2, 2, **meshes(1, 2)),
    "tensor 2 with shared positions": layout(
        ACTIVATIONS, 4, 2, **meshes(1, 2, sequence_parallel=True)
    ),
    "data 2 x pipeline 2, state": layout(STATE, 4, 4, **meshes(2, 1, microbatches=2)),
}
TIME_LAYOUTS = {
    "single": layout(MIXED, 8),
    "single, 4 microbatches": layout(MIXED, 16, microbatches=4),
    "horovod 2": layout(MIXED, 16, 2, strategy="horovod"),
    "pipeline 2": layout(MIXED, 16, 2, **meshes(2, 1, microbatches=8)),
    "tensor 2": layout(MIXED, 8, 2, **meshes(1, 2)),
}


def predicted(case: dict[str, Any], constants: str) -> Any:
    """Returns the plan of a layout on this machine."""
    values = {**case["model"], **case["fields"], "cluster": f"here:{case['processes']}"}
    return make_plan(request_of(values | {"constants": constants}))


def measured(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns what each rank saw."""
    cores = len(os.sched_getaffinity(0))
    threads = max(1, cores // case["processes"])
    shape = {"model": case["model"], "fields": case["fields"]}
    answers = run_shapes([shape], threads, case["processes"])
    return [answer["steps"][0] for answer in answers]


def compare_memory(name: str, case: dict[str, Any], constants: str) -> bool:
    """Prints one layout's fullest rank, predicted and measured."""
    plan, ranks = predicted(case, constants), measured(case)
    ours, theirs = plan.peak_bytes / 1e9, max(rank["peak_bytes"] for rank in ranks) / 1e9
    good = abs(ours / theirs - 1) <= MEMORY_BAR
    verdict = "yes" if good else "no"
    print(f"memory of {name} | within 10% | {ours:.3f} of {theirs:.3f} GB | {verdict}", flush=True)
    return good


def compare_time(name: str, case: dict[str, Any], constants: str) -> bool:
    """Prints one layout's step, predicted and measured."""
    plan, ranks = predicted(case, constants), measured(case)
    ours, theirs = plan.step.total, max(rank["seconds"] for rank in ranks)
    good = abs(ours / theirs - 1) <= TIME_BAR
    verdict = "yes" if good else "no"
    print(f"step of {name} | within 20% | {ours:.3f} of {theirs:.3f} s | {verdict}", flush=True)
    return good


def main() -> None:
    quick = "--quick" in sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        constants = str(Path(folder) / "constants.json")
        measure_to(constants)
        count = 2 if quick else None
        for name, case in list(MEMORY_LAYOUTS.items())[:count]:
            compare_memory(name, case, constants)
        for name, case in list(TIME_LAYOUTS.items())[:count]:
            compare_time(name, case, constants)


if __name__ == "__main__":
    main()
