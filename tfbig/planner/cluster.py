"""The machines of a plan: devices, links, prices; from the one file of constants. TF-free."""

import dataclasses
import functools
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfbig.errors import UserError, near_matches

CONSTANTS_PATH = Path(__file__).with_name("constants.json")


@dataclass(frozen=True)
class Device:
    """One GPU, or the share of a CPU that a process has.

    Args:
      name: as in constants.json.
      peak: dense FLOP/s by precision.
      memory_bytes: usable.
      memory_bandwidth: bytes/s.
      link_bandwidth: bytes/s to a neighbour in the node, one way.
      watts: of the device.
      units: processors that share the tiles of a matrix product; 0 where that doesn't matter.
      matmul: share of the peak that large matrix products reach.
      bandwidth: share of memory_bandwidth that streaming operations reach.
      flash: share of the peak that fused attention reaches, by generation of kernel.
      kernel_seconds: fixed time of an operation.
      host_bandwidth: bytes/s to host memory, one way; 0 where that is the device's memory.
      host_memory_bandwidth: bytes/s that operations of the node's host read and write.
    """

    name: str
    peak: Mapping[str, float]
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float
    watts: float
    units: int
    matmul: float
    bandwidth: float
    flash: Mapping[str, float]
    kernel_seconds: float = 0.0
    host_bandwidth: float = 0.0
    host_memory_bandwidth: float = 0.0

    def peak_flops(self, precision: str) -> float:
        """Returns dense FLOP/s.

        Raises:
          UserError: the device has no such arithmetic.
        """
        if precision not in self.peak:
            raise UserError(
                f"{self.name} has no {precision}: it has {', '.join(sorted(self.peak))}."
            )
        return self.peak[precision]


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices.

    Args:
      device: of each rank.
      num_devices: ranks in all.
      devices_per_node: ranks that share a node's links and network cards.
      network_bandwidth: bytes/s out of a node, one way.
      link_fraction: share of a link's bandwidth that large collectives reach.
      network_fraction: the same of the network.
      link_latency: seconds a hop inside a node.
      network_latency: seconds a hop between nodes.
      dollars_per_node_hour: price.
      price_date: of the price.
      name: what was asked for.
      overhead: of a process: context_bytes, communicator_bytes, allocator_fraction.
      host_memory_bytes: of a node, beside its devices' own.
      input_bandwidth: bytes/s at which a node reads batches.
    """

    device: Device
    num_devices: int
    devices_per_node: int
    network_bandwidth: float
    link_fraction: float
    network_fraction: float
    link_latency: float
    network_latency: float
    dollars_per_node_hour: float
    price_date: str
    name: str
    overhead: Mapping[str, float] = dataclasses.field(default_factory=dict)
    host_memory_bytes: float = math.inf
    input_bandwidth: float = math.inf

    @property
    def num_nodes(self) -> int:
        """Nodes that the ranks fill, the last one perhaps in part."""
        return -(-self.num_devices // self.devices_per_node)

    def with_devices(self, num_devices: int) -> "Cluster":
        """Returns the same cluster with another number of ranks."""
        return dataclasses.replace(self, num_devices=num_devices)


@functools.cache
def _packaged() -> dict[str, Any]:
    return json.loads(CONSTANTS_PATH.read_text(encoding="utf-8"))


def load_constants(overrides: str = "") -> dict[str, Any]:
    """Returns the constants, those of a user's file over ours, table by table.

    Args:
      overrides: a JSON file, such as `tfbig plan --measure` and `--check` write; "" means none.

    Raises:
      UserError: the file is missing or no JSON object.
    """
    constants = json.loads(json.dumps(_packaged()))
    if not overrides:
        return constants
    try:
        own = json.loads(Path(overrides).read_text(encoding="utf-8"))
        assert isinstance(own, dict)
    except (OSError, ValueError, AssertionError) as error:
        raise UserError(
            f"--constants={overrides} is no readable JSON object ({error}): write one with"
            " `tfbig plan --measure`."
        ) from None
    return _merge(constants, own)


def _merge(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    for key, value in own.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value
    return base


def make_device(constants: Mapping[str, Any], name: str) -> Device:
    """Returns the device of that name.

    Raises:
      UserError: there is none.
    """
    devices = constants["devices"]
    if name not in devices:
        raise UserError(
            f"there is no device {name!r}.{near_matches(name, list(devices))} The devices are: "
            f"{', '.join(devices)}."
        )
    row = devices[name]
    efficiency, host = constants["efficiencies"][row["efficiency"]], constants["host"]
    return Device(
        name=name,
        peak=_capped(row),
        memory_bytes=row["memory_bytes"],
        memory_bandwidth=row["memory_bandwidth"],
        link_bandwidth=row["link_bandwidth"],
        watts=row["watts"],
        units=row["units"],
        matmul=efficiency["matmul"],
        bandwidth=efficiency["bandwidth"],
        flash={k: v for k, v in efficiency.items() if k.startswith("flash")},
        kernel_seconds=row.get("kernel_seconds", constants["overhead"]["kernel_seconds"]),
        host_bandwidth=row.get("host_bandwidth", 0.0) * host["link_fraction"],
        host_memory_bandwidth=host["memory_bytes_per_second_per_node"] * host["memory_fraction"],
    )


def _here(constants: Mapping[str, Any], count: int) -> Device:
    """Returns the device that is this machine's share of `count` processes."""
    cores = len(os.sched_getaffinity(0))
    threads = max(1, cores // count)
    names = [name for name in constants["devices"] if name.startswith("here-")]
    measured = sorted(int(name.partition("-")[2]) for name in names)
    if not measured:
        raise UserError("--cluster=here: this machine is not measured yet: `tfbig plan --measure`.")
    most = max([n for n in measured if n <= threads] or measured[:1])
    device = make_device(constants, f"here-{most}")
    # More processes than were measured beside each other take turns on the cores.
    turn = min(1.0, cores / (count * most))
    return dataclasses.replace(
        device,
        peak={precision: peak * turn for precision, peak in device.peak.items()},
        memory_bandwidth=device.memory_bandwidth * turn,
        kernel_seconds=device.kernel_seconds / turn,
    )


# A device's own draw, whatever it computes: leakage and idle memory.
_IDLE_SHARE = 0.15


def _capped(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the peaks at the device's power limit.

    Below its rated power a device lowers its clock. Dynamic power goes with clock x voltage^2; with
    the voltage at its floor the clock goes with the power, with the voltage following the clock
    with its cube root. We take the middle, the square root.
    """
    rated = row.get("watts_of_peak", row["watts"])
    dynamic = (row["watts"] - _IDLE_SHARE * rated) / (rated - _IDLE_SHARE * rated)
    return {precision: peak * dynamic**0.5 for precision, peak in row["peak"].items()}


def _device_of(text: str, name: str, constants: Mapping[str, Any]) -> str:
    """Returns the device that an instance has, or that a device's own name is.

    Raises:
      UserError: there is neither.
    """
    instances, devices = constants["instances"], constants["devices"]
    if name not in instances and name not in devices:
        raise UserError(
            f"--cluster={text}: {name!r} is not known.{near_matches(name, [*instances, *devices])}"
            f" Instances: {', '.join(instances)}; devices: {', '.join(devices)}."
        )
    return instances[name]["device"] if name in instances else name


def _name_and_count(text: str) -> tuple[str, int]:
    name, _, count = text.partition(":")
    if not count.isdigit() or int(count) < 1:
        raise UserError(
            f"--cluster={text} says no number: write instance:nodes, such as p4d.24xlarge:240, or"
            " device:devices, such as a100-80:1024."
        )
    return name, int(count)


def make_cluster(
    text: str, constants: Mapping[str, Any], devices_per_node: int = 0, network_gbps: float = 0.0
) -> Cluster:
    """Returns the cluster that `--cluster` names.

    Args:
      text: `instance:nodes`, such as p4d.24xlarge:240, or `device:devices`, such as a100-80:1024.
      constants: of `load_constants`.
      devices_per_node: 0 means the instance's, and 8 for a device; `here` is one node unless this
        says otherwise.
      network_gbps: of a node, gigabits/s one way; 0 means the instance's or the device's own.

    Raises:
      UserError: no such instance or device, or no number.
    """
    name, count = _name_and_count(text)
    instances, devices = constants["instances"], constants["devices"]
    if name == "here":
        device = _here(constants, min(count, devices_per_node or count))
        name = device.name
    else:
        device = make_device(constants, _device_of(text, name, constants))
    if name in instances:
        row = instances[name]
        per_node, price, date = row["devices"], row["dollars_per_hour"], row["price_date"]
        num_devices, bandwidth = count * per_node, row["network_gbps"] * 1e9 / 8
        if devices_per_node not in (0, per_node):
            raise UserError(f"--devices_per_node={devices_per_node}: {name} has {per_node}.")
    else:
        row = devices[name]
        num_devices, per_node = count, devices_per_node or row.get("devices_per_node", 8)
        each = constants["prices"]["generic_dollars_per_device_hour"].get(name, 0.0)
        price, date, bandwidth = each * per_node, "2026-01", row["network_bandwidth_per_node"]
        if name.startswith("here"):  # processes share the machine's memory
            shared = device.memory_bytes / min(count, per_node)
            device = dataclasses.replace(device, memory_bytes=shared)
    # What was measured of the device holds in any instance that has it.
    rows = (devices[device.name], row)
    network, overhead = (
        functools.reduce(lambda a, b: a | b.get(table, {}), rows, constants[table])
        for table in ("network", "overhead")
    )
    return Cluster(
        device=device,
        num_devices=num_devices,
        devices_per_node=per_node,
        network_bandwidth=network_gbps * 1e9 / 8 if network_gbps else bandwidth,
        link_fraction=network["link_fraction"],
        network_fraction=network["network_fraction"],
        link_latency=network["link_latency"],
        network_latency=network["network_latency"],
        dollars_per_node_hour=price,
        price_date=date,
        name=text,
        overhead=overhead,
        host_memory_bytes=row.get("host_memory_bytes", math.inf),
        input_bandwidth=constants["storage"]["input_bytes_per_second_per_node"],
    )
