"""`tfbig plan` against this machine: how fast it answers, memory of ten layouts, time of five.

usage: python benchmarks/planner.py [--quick]

First it times answers, without TensorFlow. Then it measures the machine, as `tfbig plan --measure`
does, into a file of its own, and trains each layout for a few steps in processes of its own. The
machine should do nothing else meanwhile: about ten minutes on two cores. --quick measures fewer
shapes, of one process, and compares one layout.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
from tfbig.errors import UserError
from tfbig.planner.layout import Plan, make_plan
from tfbig.planner.measure import measure_to, run_shapes
from tfbig.planner.question import request_of

ROOT = Path(__file__).parents[1]
MEMORY_BAR, TIME_BAR = 0.10, 0.20
STATE = {"embed_dim": 1024, "num_layers": 2, "num_heads": 8, "vocab_size": 1024, "max_length": 64}
ACTIVATIONS = {
    "embed_dim": 128,
    "num_layers": 4,
    "num_heads": 8,
    "vocab_size": 1024,
    "max_length": 512,
}
MIXED = {"embed_dim": 512, "num_layers": 4, "num_heads": 8, "vocab_size": 8192, "max_length": 128}
CLUSTERS = "--preset=gpt3_175b --precision=bfloat16 --global_batch=1920"
QUESTIONS = {
    "one layout": (
        1.0,
        f"{CLUSTERS} --cluster=p4d.24xlarge:240 --tensor_parallel_degree=8"
        " --pipeline_parallel_degree=16 --microbatch_size=1 --sequence_parallel"
        " --shard_optimizer_state",
    ),
    "--best of 1,920 devices": (2.0, f"{CLUSTERS} --cluster=p4d.24xlarge:240 --best"),
    "--best of 16,384 devices": (
        2.0,
        "--preset=gpt3_175b --precision=bfloat16 --best"
        " --global_batch=16384 --cluster=h100-80:16384",
    ),
}
ASK = "import sys; sys.modules['tensorflow'] = None; import tfbig.plan as p; p.main(sys.argv[1:])"


class Layout(NamedTuple):
    """A model and how processes train it.

    Args:
      model: of ModelConfig.
      fields: of Config.
      processes: on this machine.
      is_timed: whether its step time is compared, too.
    """

    model: dict[str, int]
    fields: dict[str, Any]
    processes: int
    is_timed: bool


def layout(model: dict[str, int], rows: int, processes: int = 1, **fields: Any) -> Layout:
    """Returns a layout; those of MIXED are timed."""
    values = {"sequence_length": model["max_length"], "global_batch": rows, "strategy": "single"}
    return Layout(model, values | fields, processes, model is MIXED)


def meshes(pipeline: int, tensor: int, **fields: Any) -> dict[str, Any]:
    """Returns the fields of a mesh."""
    return {
        "strategy": "pipeline",
        "pipeline_parallel_degree": pipeline,
        "tensor_parallel_degree": tensor,
        **fields,
    }


LAYOUTS = {
    "single": layout(MIXED, 8),
    "single, 4 microbatches": layout(MIXED, 16, microbatches=4),
    "horovod 2": layout(MIXED, 16, 2, strategy="horovod"),
    "pipeline 2": layout(MIXED, 16, 2, **meshes(2, 1, microbatches=8)),
    "tensor 2": layout(MIXED, 8, 2, **meshes(1, 2)),
    "single, activations": layout(ACTIVATIONS, 8),
    "horovod 2, ZeRO-1, state": layout(STATE, 2, 2, strategy="horovod", shard_optimizer_state=True),
    "horovod 3, activations": layout(ACTIVATIONS, 6, 3, strategy="horovod"),
    "tensor 2, shared positions": layout(ACTIVATIONS, 4, 2, **meshes(1, 2, sequence_parallel=True)),
    "data 2 x pipeline 2, state": layout(STATE, 4, 4, **meshes(2, 1, microbatches=2)),
}


def report(name: str, bar: str, value: str, is_good: bool) -> None:
    """Prints a bar's line."""
    print(f"{name} | {bar} | {value} | {'yes' if is_good else 'no'}", flush=True)


def compare_answers(repeats: int) -> None:
    """Times answers in processes of their own that cannot import TensorFlow."""
    for name, (bar, flags) in QUESTIONS.items():
        seconds = min(ask(flags.split()) for _ in range(repeats))
        report(
            f"CPU time of an answer, {name}", f"under {bar:g} s", f"{seconds:.2f} s", seconds < bar
        )


def ask(flags: list[str]) -> float:
    """Returns the CPU seconds of a `tfbig plan`, its start included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", ASK, *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    if done.returncode:
        sys.exit(f"tfbig plan {' '.join(flags)} failed:\n{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def predicted(case: Layout, constants: str) -> Plan:
    """Returns the plan of a layout on this machine."""
    values = {**case.model, **case.fields, "cluster": f"here:{case.processes}"}
    return make_plan(request_of(values | {"constants": constants}))


def measured(case: Layout) -> list[dict[str, Any]]:
    """Returns what each rank saw."""
    cores = len(os.sched_getaffinity(0))
    threads = max(1, cores // case.processes)
    steps = 5 if case.is_timed else 2
    answers = run_shapes(
        [{"model": case.model, "fields": case.fields}], threads, case.processes, steps
    )
    return [answer["steps"][0] for answer in answers]


def compare(name: str, case: Layout, constants: str) -> None:
    """Prints one layout's fullest rank and, where it is timed, its step."""
    memory, step = f"memory of {name}", f"step of {name}"
    try:
        plan, ranks = predicted(case, constants), measured(case)
    except UserError as error:
        print(f"{name} failed: {error}", flush=True)
        report(memory, f"within {MEMORY_BAR:.0%}", "failed", False)
        if case.is_timed:
            report(step, f"within {TIME_BAR:.0%}", "failed", False)
        return
    compare_number(
        memory, MEMORY_BAR, plan.peak_bytes / 1e9, _most(ranks, "peak_bytes") / 1e9, "GB"
    )
    if case.is_timed:
        compare_number(step, TIME_BAR, plan.step.total, _most(ranks, "seconds"), "s")


def _most(ranks: list[dict[str, Any]], name: str) -> float:
    return max(rank[name] for rank in ranks)


def compare_number(name: str, bar: float, ours: float, theirs: float, unit: str) -> None:
    """Prints a prediction beside what was measured."""
    value = f"{ours:.3f} of {theirs:.3f} {unit} ({ours / theirs - 1:+.0%})"
    report(name, f"within {bar:.0%}", value, abs(ours / theirs - 1) <= bar)


def main() -> None:
    """Prints a line for each bar, and what is under way."""
    quick, began = "--quick" in sys.argv[1:], time.perf_counter()
    compare_answers(1 if quick else 3)
    if os.getloadavg()[0] > 0.5:
        print(
            f"other work runs here (load {os.getloadavg()[0]:.1f}): times are not the machine's own"
        )
    with tempfile.TemporaryDirectory() as folder:
        constants = str(Path(folder) / "constants.json")
        try:
            measure_to(constants, quick)
        except UserError as error:
            sys.exit(f"planner: {error}")
        for name, case in list(LAYOUTS.items())[: 1 if quick else None]:
            print(f"{time.perf_counter() - began:6.0f} s: {name}", flush=True)
            compare(name, case, constants)


if __name__ == "__main__":
    main()
