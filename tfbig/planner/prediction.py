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
from trainers import REACH

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


@dataclass(frozen=True)
class Machines:
    """What a run stands on.

    Args:
      num_devices: that it runs on.
      peak_source: how tfbig/hardware.py names the device.
      devices_per_node: that share a host; 0 means the usual number.
      cluster: as --cluster names them; "" means that the others say enough.
    """

    num_devices: int
    peak_source: str = ""
    devices_per_node: int = 0
    cluster: str = ""

    def record(self) -> dict[str, Any]:
        """Returns them for prediction.json."""
        names = ("num_devices", "peak_source", "devices_per_node")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def of(cls, record: Mapping[str, Any], cluster: str = "") -> "Machines":
        """Returns those of a run from its prediction, which every run writes.

        Raises:
          UserError: nothing says it.
        """
        if "num_devices" not in record:
            raise UserError(
                f"the run's {PREDICTION_FILE}, which says on how many devices it ran, is missing"
                " or damaged: restore it, or train some steps of a new run."
            )
        source = str(record.get("peak_source", ""))
        per_node = int(record.get("devices_per_node", 0))
        return cls(int(record["num_devices"]), source, per_node, cluster)


def request_for(config: Config, machines: Machines, constants_file: str = "") -> Request:
    """Returns the request of a run as it stands on its own machines.

    Args:
      config: of the run.
      machines: its own.
      constants_file: as --constants.

    Raises:
      UserError: the machine is not known: neither a GPU of the data sheets nor measured.
    """
    constants, count = own_constants(constants_file), machines.num_devices
    if machines.cluster:
        cluster = make_cluster(machines.cluster, constants)
        if cluster.num_devices != count:
            raise UserError(
                f"--cluster={machines.cluster} has {cluster.num_devices} devices, and the run ran"
                f" on {count}."
            )
    else:
        name = device_name(machines.peak_source, constants) or "here"
        cluster = make_cluster(f"{name}:{count}", constants, machines.devices_per_node)
    tokens = float(config.run.steps * tokens_per_step(config))
    return Request(config, cluster, SOFTWARE["tfbig"], tokens, constants)


def predict_run(config: Config, machines: Machines) -> dict[str, Any]:
    """Returns the prediction of a run, ready for prediction.json; never raises a UserError.

    Of a machine that is not known, only what tensors need is predicted.
    """
    record = machines.record()
    try:
        plan = make_plan(request_for(config, machines))
        return record | to_dict(plan) | {"measurable_bytes": measurable_bytes(plan)}
    except UserError as error:
        record["note"] = str(error)
    parallel = config.parallel
    model_ranks = parallel.pipeline_parallel_degree * parallel.tensor_parallel_degree
    tensors = peak(predict_memory(config, max(1, machines.num_devices // model_ranks)))
    return record | {"tensor_bytes": tensors.total}


def read_prediction(folder: Path) -> dict[str, Any]:
    """Returns what a run's prediction.json holds, {} where it has none."""
    try:
        return json.loads((folder / PREDICTION_FILE).read_bytes())
    except (OSError, ValueError):
        return {}


def is_on_gpus(plan: Plan) -> bool:
    """Returns whether tensors have a memory of their own, apart from the process."""
    return plan.request.cluster.device.host_bandwidth > 0


def measurable_bytes(plan: Plan) -> float:
    """Returns the part of rank 0's memory that a run measures, see tfbig/hardware.py.

    Of a GPU what TensorFlow's allocator gave out, so neither CUDA's context nor NCCL's buffers;
    else a whole process, which may hold several replicas.
    """
    request, first = plan.request, plan.memory[0]
    if is_on_gpus(plan):
        tensors = predict_memory(
            request.config, request.data_size, request.options, partition=plan.partition
        )
        return tensors[0].total
    parallel = request.config.parallel
    shares_process = REACH[parallel.strategy] == "host"
    replicas = request.cluster.num_devices if shares_process else max(1, parallel.num_devices)
    return first.context + replicas * (first.total - first.context)


def compared(plan: Plan, measured: Measured) -> list[tuple[str, float, float]]:
    """Returns (part, predicted, measured), seconds first, then bytes; zero parts left out.

    What is measured is rank 0's, so its stage's parts are predicted, too.
    """
    step = plan.step_of(0)
    predicted = {
        "data": step.data_exposed + step.data_hidden,
        "tensor": step.tensor,
        "pipeline": step.pipeline + step.bubble,
    }
    passes = step.compute + step.recompute + step.optimizer + step.transfers
    rows = [
        ("step", plan.step.total, measured.step_seconds),
        ("passes and update", passes, measured.compute_seconds),
    ]
    # What waits for another pipeline rank is in flight too: its exchanges are rendezvous.
    for axis, seconds in measured.communication_seconds.items():
        rows.append((f"{axis} axis", predicted.get(axis, 0.0), seconds))
    rows.append(("input", step.input, measured.data_wait_seconds))
    rows.append(("peak memory", measurable_bytes(plan), measured.peak_memory_bytes))
    return [row for row in rows if row[1] or row[2]]
