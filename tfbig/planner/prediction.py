"""What a run is predicted to need, beside what it then measures. TensorFlow-free."""

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfbig.config import Config
from tfbig.errors import UserError
from tfbig.planner.cluster import make_cluster
from tfbig.planner.flops import tokens_per_step
from tfbig.planner.layout import Plan, Request, make_plan
from tfbig.planner.memory import peak, predict_memory
from tfbig.planner.question import own_constants
from tfbig.planner.report import to_dict
from tfbig.planner.software import SOFTWARE

PREDICTION_FILE = "prediction.json"
FIRST_STEPS = 3  # of a process: tracing and warm caches


@dataclass(frozen=True)
class Measured:
    """What a run's records say of a usual step, by part.

    Args:
      step_seconds: median.
      compute_seconds: of it neither waiting for input nor communication.
      communication_seconds: by mesh axis.
      data_wait_seconds: waiting for batches.
      peak_memory_bytes: of rank 0's process or GPU.
      num_steps: that the medians are of.
    """

    step_seconds: float
    compute_seconds: float
    communication_seconds: Mapping[str, float]
    data_wait_seconds: float
    peak_memory_bytes: float
    num_steps: int


def measured_of(records: Sequence[Mapping[str, Any]]) -> Measured:
    """Returns the medians over a run's steps, its first ones left out.

    Raises:
      UserError: there are too few.
    """
    steady = list(records[FIRST_STEPS:])
    if len(steady) < 3:
        raise UserError(
            f"the run has {len(records)} steps: at least {FIRST_STEPS + 3} are needed, as the first"
            f" {FIRST_STEPS} are not like the others."
        )

    def median(name: str) -> float:
        return statistics.median(float(record[name]) for record in steady)

    axes = {axis for record in steady for axis in record["communication_seconds"]}
    return Measured(
        step_seconds=median("step_seconds"),
        compute_seconds=median("compute_seconds"),
        communication_seconds={
            axis: statistics.median(r["communication_seconds"].get(axis, 0.0) for r in steady)
            for axis in sorted(axes)
        },
        data_wait_seconds=median("data_wait_seconds"),
        peak_memory_bytes=max(float(record["peak_memory_bytes"]) for record in steady),
        num_steps=len(steady),
    )


def device_name(text: str, constants: Mapping[str, Any]) -> str:
    """Returns our name of a GPU as its driver names it, "" for one that constants don't have.

    >>> device_name("data sheet of NVIDIA A100-SXM4-80GB", own_constants())
    'a100-80'
    """
    found = re.search(r"(V100|A100|H100|H200|B200|B300|L4|T4)\b", text)
    if not found:
        return ""
    model = found[1].lower()
    names = [n for n in constants["devices"] if n.partition("-")[0] == model]
    size = re.search(r"(\d+)\s*GB", text)
    wanted = f"{model}-{size[1]}" if size else ""
    return wanted if wanted in names else (names[-1] if names else "")


def request_for(
    config: Config, num_devices: int, peak_source: str, constants_file: str = ""
) -> Request:
    """Returns the request of a run as it stands on its own machines.

    Args:
      config: of the run.
      num_devices: that it runs on.
      peak_source: how tfbig/hardware.py names the device.
      constants_file: as --constants.

    Raises:
      UserError: the machine is not known: neither a GPU of the data sheets nor measured.
    """
    constants = own_constants(constants_file)
    name = device_name(peak_source, constants) or "here"
    cluster = make_cluster(f"{name}:{num_devices}", constants)
    tokens = float(config.run.steps * tokens_per_step(config))
    return Request(config, cluster, SOFTWARE["tfbig"], tokens, constants)


def predict_run(config: Config, num_devices: int, peak_source: str = "") -> dict[str, Any]:
    """Returns the prediction of a run, ready for prediction.json; never raises a UserError.

    Of a machine that is not known, only what tensors need is predicted.
    """
    record: dict[str, Any] = {"num_devices": num_devices, "peak_source": peak_source}
    try:
        return record | to_dict(make_plan(request_for(config, num_devices, peak_source)))
    except UserError as error:
        record["note"] = str(error)
    parallel = config.parallel
    model_ranks = parallel.pipeline_parallel_degree * parallel.tensor_parallel_degree
    tensors = peak(predict_memory(config, max(1, num_devices // model_ranks)))
    return record | {"tensor_bytes": tensors.total}


def read_prediction(folder: Path) -> dict[str, Any]:
    """Returns what a run's prediction.json holds, {} where it has none."""
    try:
        return json.loads((folder / PREDICTION_FILE).read_bytes())
    except (OSError, ValueError):
        return {}


def num_devices_of(record: Mapping[str, Any]) -> int:
    """Returns the devices of a run from its prediction, which every run writes.

    Raises:
      UserError: nothing says it.
    """
    if "num_devices" not in record:
        raise UserError(
            f"the run's {PREDICTION_FILE}, which says on how many devices it ran, is missing or"
            " damaged: restore it, or train some steps of a new run."
        )
    return int(record["num_devices"])


def compared(plan: Plan, measured: Measured) -> list[tuple[str, float, float]]:
    """Returns (part, predicted, measured), seconds first, then bytes; zero parts left out."""
    step = plan.step
    predicted = {
        "data": step.data_exposed + step.data_hidden,
        "tensor": step.tensor,
        "pipeline": step.pipeline + step.bubble,
    }
    passes = step.compute + step.recompute + step.optimizer
    rows = [
        ("step", step.total, measured.step_seconds),
        ("passes and update", passes, measured.compute_seconds),
    ]
    # What waits for another pipeline rank is in flight too: its exchanges are rendezvous.
    for axis, seconds in measured.communication_seconds.items():
        rows.append((f"{axis} axis", predicted.get(axis, 0.0), seconds))
    rows.append(("input", step.input, measured.data_wait_seconds))
    rows.append(("peak memory", plan.memory[0].total, measured.peak_memory_bytes))
    return [row for row in rows if row[1] or row[2]]
