"""Constants of this machine, from a few small training steps on it. TensorFlow-free itself.

Other processes do the work (tfbig/planner/measure_steps.py): one for each number of threads, and
two together for the link between processes. Two shares and the fixed time of an operation are then
fitted on what whole steps took, by the same model that predicts them.
"""

import dataclasses
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tfbig.durable_file import write_atomic
from tfbig.errors import UserError
from tfbig.planner.cluster import Device, load_constants, make_cluster
from tfbig.planner.measure_steps import (
    MEMORY_SHAPES,
    MESH_SHAPES,
    PAIR_SHAPE,
    SHAPES,
    STEPS,
    config_of,
)
from tfbig.planner.memory import HOST_COPIES, MemoryOptions, Overhead, peak, predict_memory
from tfbig.planner.question import constants_path
from tfbig.planner.software import SOFTWARE
from tfbig.planner.step_time import StepModel
from trainers.partition import choose_partition

_PATIENCE = 1200.0  # seconds for one process; on an idle machine it needs half a minute
_LINK = "tfbig.planner.measure_link"
MOST_COPIES = 8  # processes that are measured beside each other
QUICK_SHAPES = 4
# Shares and seconds of an operation that a fit begins from, and how much it is held to them.
_USUAL, _HELD = (0.6, 0.6, 2e-5), 0.005


def measure_to(path: str = "", quick: bool = False) -> int:
    """Measures this machine, writes its constants and prints them; returns an exit code.

    Args:
      path: JSON file to write; "" means where `tfbig plan` and train look for it.
      quick: fewer shapes, and of one process only.

    Raises:
      UserError: a measuring process failed, or the file cannot be written.
    """
    constants = measured_constants(quick)
    target = Path(path or constants_path())
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, json.dumps(constants, indent=1).encode())
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error}") from None
    for name, row in constants["devices"].items():
        own = constants["efficiencies"][name]
        print(
            f"{name}: {row['peak']['float32'] / 1e9:,.1f} GFLOP/s, of which products reach"
            f" {own['matmul']:.0%}; {row['memory_bandwidth'] / 1e9:,.1f} GB/s, of which streaming"
            f" reaches {own['bandwidth']:.0%}; {1e6 * row['kernel_seconds']:,.1f} us an operation;"
            f" a process {row['overhead']['context_bytes'] / 1e9:.2f} GB"
        )
    print(f"written to {target}; --cluster=here:N plans N processes of this machine")
    return 0


def measured_constants(quick: bool = False) -> dict[str, Any]:
    """Returns devices and efficiencies of this machine, ready for JSON."""
    cores, began = len(os.sched_getaffinity(0)), time.perf_counter()

    def say(what: str) -> None:
        print(f"{time.perf_counter() - began:6.1f} s: measuring {what}", flush=True)

    shapes, measured = SHAPES[:QUICK_SHAPES] if quick else SHAPES, {}
    for threads in [cores] if quick else sorted({1, cores}):
        # As many as will run beside each other: they share caches, memory and clock.
        copies = min(MOST_COPIES, cores // threads)
        say(f"training steps on {threads} thread(s) of {copies} process(es)")
        measured[threads] = together_of(run_copies(shapes, threads, copies))
    say("memory")
    memory = run_apart(MEMORY_SHAPES[: 2 if quick else None], cores)
    overhead = fit_overhead(memory)
    link = {"bandwidth": 1e9, "latency": 2e-4}  # a plain guess, without Horovod
    if not quick and _horovodrun():
        say("the link between two processes")
        link = _run([_horovodrun(), "-np", "2", sys.executable, "-m", _LINK])[0]
        say("memory of two processes")
        threads = max(1, cores // 2)
        shape = _with_fields(PAIR_SHAPE, strategy="horovod")
        overhead = with_communicator(overhead, shape, _peak_of_two(shape, threads))
        mesh = {"strategy": "pipeline", "tensor_parallel_degree": 2}
        meshes = [_with_fields(one, **mesh) for one in MESH_SHAPES]
        overhead = with_passes(overhead, [(one, _peak_of_two(one, threads)) for one in meshes])
    return constants_of(measured, overhead, link, psutil.virtual_memory().total)


def _with_fields(shape: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    return {**shape, "fields": {**shape["fields"], **fields}}


def _peak_of_two(shape: Mapping[str, Any], threads: int) -> float:
    """Returns the peak bytes of the fuller of two processes that train a shape together."""
    ranks = run_shapes([shape], threads, 2, steps=2)
    return max(rank["steps"][0]["peak_bytes"] for rank in ranks)


def run_copies(
    shapes: Sequence[Mapping[str, Any]], threads: int, copies: int
) -> list[dict[str, Any]]:
    """Returns what each of some processes saw of all shapes, all of them at work at once."""
    worker = _worker(threads, shapes, STEPS, with_machine=True)
    with ThreadPoolExecutor(copies) as pool:
        return [answer for [answer] in pool.map(_run, [worker] * copies)]


def run_apart(shapes: Sequence[Mapping[str, Any]], cores: int) -> list[dict[str, Any]]:
    """Returns what a process of its own saw of each shape; as many at a time as there are cores."""
    workers = [_worker(1, [shape], 2) for shape in shapes]
    with ThreadPoolExecutor(min(cores, MOST_COPIES)) as pool:
        return [answer["steps"][0] for [answer] in pool.map(_run, workers)]


def together_of(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the mean of what processes saw that worked beside each other."""

    def mean(values: Sequence[float]) -> float:
        return statistics.fmean(values)

    rows = zip(*(answer["steps"] for answer in answers), strict=True)
    steps = [{**row[0], "seconds": mean([one["seconds"] for one in row])} for row in rows]
    flops = {
        precision: mean([answer["matrix_flops"][precision] for answer in answers])
        for precision in answers[0]["matrix_flops"]
    }
    streamed = mean([answer["stream_bytes"] for answer in answers])
    return {"matrix_flops": flops, "stream_bytes": streamed, "steps": steps}


def _worker(
    threads: int, shapes: Sequence[Mapping[str, Any]], steps: int, with_machine: bool = False
) -> list[str]:
    command = [sys.executable, "-m", "tfbig.planner.measure_steps"]
    command += [str(threads), json.dumps(list(shapes)), str(steps)]
    return [*command, "machine"] if with_machine else command


def run_shapes(
    shapes: Sequence[Mapping[str, Any]], threads: int, num_processes: int = 1, steps: int = STEPS
) -> list[dict[str, Any]]:
    """Returns what each of the processes saw of the shapes, in order of rank.

    Args:
      shapes: of tfbig/planner/measure_steps.py.
      threads: of each process.
      num_processes: more than one run under horovodrun.
      steps: of each shape, after a first one.
    """
    worker = _worker(threads, shapes, steps)
    if num_processes > 1:
        worker = [_horovodrun(), "-np", str(num_processes), *worker]
    answers = _run(worker)
    if len(answers) != num_processes:
        raise UserError(f"{len(answers)} of {num_processes} measuring processes answered.")
    return sorted(answers, key=lambda answer: answer["steps"][0]["rank"])


def _horovodrun() -> str:
    beside = Path(sys.executable).with_name("horovodrun")
    return str(beside) if beside.exists() else (shutil.which("horovodrun") or "")


def _run(command: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the JSON objects that a command prints, one a line."""
    # These are a CPU's constants: on a host with GPUs, too.
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    try:
        done = subprocess.run(
            list(command), capture_output=True, text=True, timeout=_PATIENCE, env=environment
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"measuring took more than {_PATIENCE:g} s: this machine is too busy to be measured."
        ) from None
    lines = [line[line.index("{") :] for line in done.stdout.splitlines() if '{"' in line]
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"measuring failed ({last}): is TensorFlow installed?")
    return [json.loads(line) for line in lines]


def constants_of(
    measured: Mapping[int, Mapping[str, Any]],
    overhead: Overhead,
    link: Mapping[str, float],
    memory_bytes: float,
) -> dict[str, Any]:
    """Returns devices and efficiencies, ready for JSON, from what the processes saw.

    Args:
      measured: by threads, what tfbig/planner/measure_steps.py printed.
      overhead: of a process.
      link: bandwidth and latency of an all-reduce between two processes.
      memory_bytes: of the machine.
    """
    devices, efficiencies = {}, {}
    when = time.strftime("%Y-%m-%d", time.gmtime())
    for threads, saw in measured.items():
        name = f"here-{threads}"
        device, error = fit_device(saw)
        devices[name] = {
            "peak": dict(saw["matrix_flops"]),
            "memory_bytes": memory_bytes,
            "memory_bandwidth": saw["stream_bytes"],
            "link_bandwidth": link["bandwidth"],
            "watts": 15.0 * threads,
            "units": 0,
            "kernel_seconds": device.kernel_seconds,
            "network_bandwidth_per_node": link["bandwidth"],
            "devices_per_node": 1 << 20,
            "efficiency": name,
            "network": {"link_fraction": 1.0, "link_latency": link["latency"]},
            "overhead": {
                "context_bytes": overhead.context,
                "communicator_bytes": overhead.communicator,
                "allocator_fraction": overhead.allocator,
                "transport_copies": overhead.copies,
                "passes_bytes": overhead.passes,
            },
            "source": f"measured {when} on {platform.processor() or platform.machine()}",
        }
        efficiencies[name] = {
            "matmul": device.matmul,
            "bandwidth": device.bandwidth,
            "flash": device.matmul,
            "source": f"fitted {when} on {len(saw['steps'])} training steps, which it meets within"
            f" {error:.0%} in the mean",
        }
    return {"devices": devices, "efficiencies": efficiencies}


class ShapeModel:
    """Predicts one shape's step in one process of any device.

    Args:
      shape: {"model", "fields"} of tfbig/planner/measure_steps.py.
    """

    def __init__(self, shape: Mapping[str, Any]) -> None:
        self._config = config_of(shape, 1)
        self._cluster = make_cluster("l4:1", load_constants())
        self._partition = choose_partition(self._config, self._config.run.global_batch)

    def seconds(self, device: Device) -> float:
        """Returns the predicted seconds of the step."""
        cluster = dataclasses.replace(self._cluster, device=device)
        software, options = SOFTWARE["tfbig"], MemoryOptions()
        model = StepModel(self._config, cluster, options, software, self._partition)
        return model.predict().total


def fit_device(saw: Mapping[str, Any]) -> tuple[Device, float]:
    """Returns the device whose predictions are nearest, and their mean error.

    Args:
      saw: matrix_flops by precision, stream_bytes and steps of one process.
    """

    def device(values: Sequence[float]) -> Device:
        matmul, bandwidth, kernel = values
        return Device(
            name="here",
            peak=saw["matrix_flops"],
            memory_bytes=1e9,
            memory_bandwidth=saw["stream_bytes"],
            link_bandwidth=1e9,
            watts=1.0,
            units=0,
            matmul=matmul,
            bandwidth=bandwidth,
            flash={"flash": matmul},
            kernel_seconds=kernel,
        )

    models = [ShapeModel(row) for row in saw["steps"]]

    def errors(values: Sequence[float]) -> np.ndarray:
        own = device(values)
        pairs = zip(models, saw["steps"], strict=True)
        return np.array([math.log(model.seconds(own) / row["seconds"]) for model, row in pairs])

    def held(values: Sequence[float]) -> np.ndarray:
        # What no shape depends on stays where it began, whatever noise there is.
        return np.concatenate([errors(values), _HELD * np.log(np.array(values) / _USUAL)])

    best = least_squares(held, _USUAL)
    return device(best), float(np.mean(np.abs(np.expm1(errors(best)))))


def least_squares(
    residuals: Callable[[Sequence[float]], np.ndarray], start: Sequence[float], rounds: int = 40
) -> list[float]:
    """Returns positive numbers for which the sum of squared residuals is small.

    Levenberg-Marquardt (Marquardt, 1963) over the numbers' logarithms, so that they stay positive.

    >>> [round(x, 3) for x in least_squares(lambda v: np.array([v[0] - 2, v[1] - 3]), [1, 1])]
    [2.0, 3.0]
    """
    place, damping, width = np.log(np.array(start, float)), 1e-2, 1e-4
    seen = residuals(list(np.exp(place)))
    for _ in range(rounds):
        slopes = np.stack(
            [
                (residuals(list(np.exp(place + d))) - seen) / width
                for d in width * np.eye(len(place))
            ],
            axis=1,
        )
        square = slopes.T @ slopes
        move = np.linalg.solve(square + damping * np.eye(len(place)), -slopes.T @ seen)
        trial = place + np.clip(move, -1.0, 1.0)
        then = residuals(list(np.exp(trial)))
        if then @ then < seen @ seen:
            place, seen, damping = trial, then, damping / 3
            if np.max(np.abs(move)) < 1e-5:
                break
        else:
            damping *= 4
    return list(np.exp(place))


def fit_overhead(rows: Sequence[Mapping[str, Any]]) -> Overhead:
    """Returns a process's own bytes and the allocator's share, by least squares.

    Args:
      rows: shapes with peak_bytes.
    """
    tensors = [peak(predict_memory(config_of(row, 1), 1)).total for row in rows]
    peaks = [float(row["peak_bytes"]) for row in rows]
    mean_x, mean_y = sum(tensors) / len(rows), sum(peaks) / len(rows)
    spread = sum((x - mean_x) ** 2 for x in tensors)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(tensors, peaks, strict=True)) / spread
    slope = max(1.0, slope)
    return Overhead(
        context=mean_y - slope * mean_x,
        communicator=2e7,
        allocator=slope - 1,
        copies=HOST_COPIES,
    )


def with_communicator(overhead: Overhead, shape: Mapping[str, Any], peak_bytes: float) -> Overhead:
    """Returns the overhead with a communicator's bytes, from one of two processes' memory.

    Args:
      overhead: of a process alone.
      shape: that both trained.
      peak_bytes: of either.
    """
    without = dataclasses.replace(overhead, communicator=0.0)
    predicted = peak(predict_memory(config_of(shape, 1), 2, overhead=without)).total
    groups = 2  # the world and the data axis
    each = (peak_bytes - predicted) / groups / (1 + overhead.allocator)
    return dataclasses.replace(overhead, communicator=max(0.0, each))


def with_passes(overhead: Overhead, seen: Sequence[tuple[Mapping[str, Any], float]]) -> Overhead:
    """Returns the overhead with what passes as functions of their own take: the mean of shapes.

    Args:
      overhead: with a communicator's bytes.
      seen: shapes that two processes trained as a tensor group, with the peak bytes of either.
    """
    more = [
        peak_bytes - peak(predict_memory(config_of(shape, 1), 1, overhead=overhead)).total
        for shape, peak_bytes in seen
    ]
    return dataclasses.replace(overhead, passes=max(0.0, statistics.fmean(more)))
