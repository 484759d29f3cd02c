"""A run's measurements beside their prediction, and constants that would have met them. TF-free."""

import json
from pathlib import Path
from typing import Any

from tfbig.config import from_dict
from tfbig.durable_file import write_atomic
from tfbig.errors import UserError
from tfbig.planner.cluster import load_constants
from tfbig.planner.layout import Plan, make_plan
from tfbig.planner.network import line_of
from tfbig.planner.prediction import (
    Machines,
    Measured,
    compared,
    is_on_gpus,
    measurable_bytes,
    measured_of,
    read_prediction,
    request_for,
)
from tfbig.planner.question import constants_path
from tfbig.planner.step_time import mesh_of
from tfbig.run_folder import RunFolder, read_metrics

_LEAST, _MOST = 1e-4, 1.5  # a share of a peak that is still believed


def check_run(run: str, constants_file: str = "", cluster: str = "") -> str:
    """Returns a run's prediction beside its measurements, and writes recalibrated constants.

    Args:
      run: its folder.
      constants_file: JSON file to read and to write; "" means the usual one.
      cluster: that it ran on, as --cluster names it; "" means what the run noted of it.

    Raises:
      UserError: it is no run's folder, has too few steps, or its machine is not known.
    """
    folder = RunFolder(run)
    config = from_dict(folder.read_config()["config"])
    machines = Machines.of(read_prediction(Path(folder.path)), cluster)
    request = request_for(config, machines, constants_file)
    measured = measured_of(read_metrics(run))
    plan = make_plan(request)
    target = Path(constants_file or constants_path())
    factors = recalibrate(plan, measured, target)
    return "\n".join([table(plan, measured), "", *factors, f"written to {target}"])


def table(plan: Plan, measured: Measured) -> str:
    """Returns predicted and measured parts, a line each."""
    lines = [
        f"{'':<20}{'predicted':>14}{'measured':>14}{'error':>9}   of {measured.num_steps} steps"
    ]
    for name, predicted, seen in compared(plan, measured):
        unit, scale = ("GB", 1e9) if name == "peak memory" else ("s", 1.0)
        error = f"{predicted / seen - 1:+.0%}" if seen else ""
        values = f"{predicted / scale:>11,.4f} {unit:<2}{seen / scale:>11,.4f} {unit:<2}"
        lines.append(f"{name:<20}{values}{error:>9}")
    return "\n".join(lines)


def recalibrate(plan: Plan, measured: Measured, target: Path) -> list[str]:
    """Writes constants with which the passes, the collectives and the memory would be met.

    All three of a device's own numbers move by one factor, so that their balance stays as it was
    fitted; what the data axis goes over by another; what is left of memory is a process's own
    bytes, or, of a GPU's tensors, its allocator's.

    Returns:
      What changed, a line each.
    """
    own = _read(target)
    device, step = plan.request.cluster.device, plan.step_of(0)
    row = plan.request.constants["devices"][device.name]
    rates = own.setdefault("efficiencies", {}).setdefault(row["efficiency"], {})
    settings = own.setdefault("devices", {}).setdefault(device.name, {})
    passes, seen = step.compute + step.recompute + step.optimizer, measured.compute_seconds
    seen -= step.transfers  # which these numbers don't change
    lines = []
    if seen > 0 and passes > 0:
        factor = passes / seen
        for name, value in (("matmul", device.matmul), ("bandwidth", device.bandwidth)):
            # Beyond belief only where it was before: one factor then meets what was measured.
            rates[name] = min(max(_MOST, value), max(_LEAST, value * factor))
        settings["kernel_seconds"] = device.kernel_seconds / factor
        lines.append(f"passes were {1 / factor:.2f} times as long as predicted: shares of the peak")
        lines[-1] += f" {device.matmul:.2f} -> {rates['matmul']:.2f}, bandwidth"
        lines[-1] += f" {device.bandwidth:.2f} -> {rates['bandwidth']:.2f}"
    spent = measured.communication_seconds.get("data", 0.0)
    expected = step.data_exposed + step.data_hidden
    if spent > 0 and expected > 0:
        lines.append(_set_link(plan, expected / spent, own))
    lines.append(_set_memory(plan, measured, settings.setdefault("overhead", {})))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, json.dumps(own, indent=1).encode())
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error}") from None
    return lines


def _set_link(plan: Plan, factor: float, own: dict[str, Any]) -> str:
    """Sets the share that collectives of the data axis reach of what they go over.

    Args:
      plan: of the run.
      factor: predicted seconds of measured ones.
      own: the constants to write.

    Returns:
      What changed.
    """
    cluster = plan.request.cluster
    mesh = mesh_of(plan.request.config, cluster.num_devices, plan.request.software)
    crosses = line_of(cluster, mesh, "data").nodes > 1
    name = "network_fraction" if crosses else "link_fraction"
    # The network is an instance's, where one was named; links are the device's.
    instance = cluster.name.partition(":")[0]
    is_named = crosses and instance in plan.request.constants["instances"]
    table, row = ("instances", instance) if is_named else ("devices", cluster.device.name)
    network = own.setdefault(table, {}).setdefault(row, {}).setdefault("network", {})
    network[name] = getattr(cluster, name) * factor
    return (
        f"collectives of the data axis were {1 / factor:.2f} times as long as predicted:"
        f" {name.replace('_fraction', ' share')} {getattr(cluster, name):.2f} ->"
        f" {network[name]:.2f}"
    )


def _set_memory(plan: Plan, measured: Measured, overhead: dict[str, float]) -> str:
    """Sets what a process, or the allocator of a GPU, takes beside counted tensors; says it."""
    seen, counted = measured.peak_memory_bytes, measurable_bytes(plan)
    if is_on_gpus(plan):
        # Never below the packaged share: that is what lies unused between tensors.
        usual = load_constants()["overhead"]["allocator_fraction"]
        share = overhead["allocator_fraction"] = max(usual, seen / counted - 1)
        before = plan.request.cluster.overhead["allocator_fraction"]
        return (
            f"tensors took {seen / counted:.2f} times what is counted: the allocator's share"
            f" {before:.0%} -> {share:.0%}"
        )
    context = plan.memory[0].context
    overhead["context_bytes"] = max(0.0, context + seen - counted)
    return (
        f"memory was {(seen - counted) / 1e9:+.3f} GB beyond the prediction: a process's own bytes"
        f" {context / 1e9:.3f} -> {overhead['context_bytes'] / 1e9:.3f} GB"
    )


def _read(target: Path) -> dict[str, Any]:
    try:
        own = json.loads(target.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{target} cannot be read: {error}") from None
    return own if isinstance(own, dict) else {}
