"""A run's measurements beside their prediction, and constants that would have met them. TF-free."""

import json
from pathlib import Path
from typing import Any

from tfbig.config import from_dict
from tfbig.durable_file import write_atomic
from tfbig.errors import UserError
from tfbig.planner.layout import Plan, make_plan
from tfbig.planner.prediction import (
    Measured,
    compared,
    measured_of,
    num_devices_of,
    read_prediction,
    request_for,
)
from tfbig.planner.question import constants_path
from tfbig.run_folder import RunFolder, read_metrics

_LEAST, _MOST = 1e-4, 1.5  # a share of a peak that is still believed


def check_run(run: str, constants_file: str = "") -> str:
    """Returns a run's prediction beside its measurements, and writes recalibrated constants.

    Args:
      run: its folder.
      constants_file: JSON file to read and to write; "" means the usual one.

    Raises:
      UserError: it is no run's folder, has too few steps, or its machine is not known.
    """
    folder = RunFolder(run)
    config = from_dict(folder.read_config()["config"])
    record = read_prediction(Path(folder.path))
    source = str(record.get("peak_source", ""))
    request = request_for(config, num_devices_of(record), source, constants_file)
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
    fitted; links by another; a process's own bytes take what is left of memory.

    Returns:
      What changed, a line each.
    """
    own = _read(target)
    device, cluster, step = plan.request.cluster.device, plan.request.cluster, plan.step
    row = plan.request.constants["devices"][device.name]
    rates = own.setdefault("efficiencies", {}).setdefault(row["efficiency"], {})
    settings = own.setdefault("devices", {}).setdefault(device.name, {})
    passes = step.compute + step.recompute + step.optimizer
    lines = []
    if measured.compute_seconds > 0 and passes > 0:
        factor = passes / measured.compute_seconds
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
        factor = expected / spent
        network = settings.setdefault("network", {})
        network["link_fraction"] = cluster.link_fraction * factor
        network["network_fraction"] = cluster.network_fraction * factor
        lines.append(
            f"collectives of the data axis were {1 / factor:.2f} times as long as predicted: link"
            f" share {cluster.link_fraction:.2f} -> {network['link_fraction']:.2f}"
        )
    missing = measured.peak_memory_bytes - plan.memory[0].total
    context = max(0.0, plan.memory[0].context + missing)
    settings.setdefault("overhead", {})["context_bytes"] = context
    lines.append(
        f"memory was {missing / 1e9:+.3f} GB beyond the prediction: a process's own bytes"
        f" {plan.memory[0].context / 1e9:.3f} -> {context / 1e9:.3f} GB"
    )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, json.dumps(own, indent=1).encode())
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error}") from None
    return lines


def _read(target: Path) -> dict[str, Any]:
    try:
        own = json.loads(target.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{target} cannot be read: {error}") from None
    return own if isinstance(own, dict) else {}
