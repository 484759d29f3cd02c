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
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tfbig.durable_file import write_atomic
from tfbig.errors import UserError
from tfbig.planner.cluster import Device, load_constants, make_cluster
from tfbig.planner.measure_steps import MEMORY_SHAPES, SHAPES, STEPS, config_of
from tfbig.planner.memory import MemoryOptions, Overhead, peak, predict_memory
from tfbig.planner.question import constants_path
from tfbig.planner.software import SOFTWARE
from tfbig.planner.step_time import StepModel
from trainers.partition import choose_partition

_PATIENCE = 1200.0  # seconds for one process; on an idle machine it needs half a minute
_LINK = "tfbig.planner.measure_link"


def measure_to(path: str = "") -> int:
    """Measures this machine, writes its constants and prints them; returns an exit code.

    Args:
      path: JSON file to write; "" means where `tfbig plan` and train look for it.

    Raises:
      UserError: a measuring process failed, or the file cannot be written.
    """
    cores = len(os.sched_getaffinity(0))
    measured = {}
    for threads in sorted({1, cores}):
        print(f"measuring training steps on {threads} thread(s)", flush=True)
        measured[threads] = run_shapes(SHAPES, threads)[0]
    print("measuring memory", flush=True)
    memory = [run_shapes([shape], cores, steps=2)[0]["steps"][0] for shape in MEMORY_SHAPES]
    print("measuring the link between two processes", flush=True)
    constants = constants_of(measured, memory, measure_link(), psutil.virtual_memory().total)
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
    worker = [sys.executable, "-m", "tfbig.planner.measure_steps"]
    worker += [str(threads), json.dumps(list(shapes)), str(steps)]
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
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
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


def measure_link() -> dict[str, float]:
    """Returns bandwidth and latency of an all-reduce between two processes.

    Without Horovod, the plain guess of 1 GB/s and 0.2 ms.
    """
    launcher = _horovodrun()
    if not launcher:
        return {"bandwidth": 1e9, "latency": 2e-4}
    return _run([launcher, "-np", "2", sys.executable, "-m", _LINK])[0]


def constants_of(
    measured: Mapping[int, Mapping[str, Any]],
    memory: Sequence[Mapping[str, Any]],
    link: Mapping[str, float],
    memory_bytes: float,
) -> dict[str, Any]:
    """Returns devices and efficiencies, ready for JSON, from what the processes saw.

    Args:
      measured: by threads, what tfbig/planner/measure_steps.py printed.
      memory: shapes with peak_bytes, each of a process of its own.
      link: of `measure_link`.
      memory_bytes: of the machine.
    """
    devices, efficiencies = {}, {}
    overhead = fit_overhead(memory)
    when = time.strftime("%Y-%m-%d", time.gmtime())
    for threads, saw in measured.items():
        name = f"here-{threads}"
        device, error = fit_device(saw)
        devices[name] = {
            "peak": {"float32": saw["matrix_flops"]},
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
      saw: matrix_flops, stream_bytes and steps of one process.
    """

    def device(values: Sequence[float]) -> Device:
        matmul, bandwidth, kernel = values
        return Device(
            name="here",
            peak={"float32": saw["matrix_flops"]},
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

    best = least_squares(errors, [0.6, 0.6, 2e-5])
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
    return Overhead(context=mean_y - slope * mean_x, communicator=2e7, allocator=slope - 1)
