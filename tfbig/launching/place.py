"""Where a launcher stands among those of a job, and which ranks each of them starts.

A launcher runs on each host (under Slurm: as each task) and starts the ranks there itself: no ssh,
and the ranks stay in the job's own cgroup. TensorFlow-free.
"""

import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from tfbig.errors import UserError
from tfbig.launching.launch_config import LaunchConfig
from trainers.slurm import in_slurm_step, place_from_slurm

DEFAULT_PORT = 7777  # below those that systems hand out by themselves
SRUN = "srun --ntasks-per-node=8 python -m tfbig.launch --cluster=slurm -- python -m tfbig.train"


class Place(NamedTuple):
    """One launcher among those of a job."""

    number: int
    num_launchers: int
    first_host: str  # where launcher 0 runs
    port: int  # at which it waits for the others
    num_processes: int  # that this launcher starts
    hosts: Sequence[str] = ()  # of all launchers, where whoever started them says so


class Slot(NamedTuple):
    """One rank."""

    host: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def num_gpus(environ: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> int:
    """Returns the GPUs that processes started here will see, without starting CUDA.

    Args:
      environ: CUDA_VISIBLE_DEVICES narrows them.
      devices: where the driver makes its files.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([word for word in visible.split(",") if word.strip() not in ("", "-1")])
    return sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in devices.glob("nvidia*"))


def place_by_slurm(config: LaunchConfig, environ: Mapping[str, str] = os.environ) -> Place:
    """Returns the place of a task of a Slurm step.

    Raises:
      UserError: this is none, or its variables make no sense.
    """
    if not in_slurm_step(environ):
        raise UserError(f"--cluster=slurm outside a step of Slurm's: start it as `{SRUN} ...`.")
    count = config.processes_per_host or 1
    place = place_from_slurm(environ)
    if place is None:
        return Place(0, 1, "localhost", config.port or DEFAULT_PORT, count)
    hosts, ports = zip(*(address.rsplit(":", 1) for address in place.addresses), strict=True)
    return Place(place.rank, len(hosts), hosts[0], config.port or int(ports[0]), count, hosts)


def place_by_mpi(
    hosts: Sequence[str], config: LaunchConfig, environ: Mapping[str, str] = os.environ
) -> Place:
    """Returns the place of a process that mpirun started; only its rank and number are used.

    Args:
      hosts: the first of them is that of rank 0; none where all run on one host.
      config: `port` and `processes_per_host`.
      environ: Open MPI's variables, or PMI's.

    Raises:
      UserError: this is no such process, or nobody says where rank 0 is.
    """
    for prefix in ("OMPI_COMM_WORLD_", "PMI_"):
        rank, size = environ.get(f"{prefix}RANK", ""), environ.get(f"{prefix}SIZE", "")
        if rank.isdigit() and size.isdigit():
            break
    else:
        raise UserError(
            "--cluster=mpi outside mpirun: start it as `mpirun -np 2 python -m tfbig.launch "
            "--cluster=mpi -- python -m tfbig.train ...`."
        )
    on_one_host = environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1") == size
    if not hosts and not on_one_host:
        raise UserError("mpirun does not say where rank 0 runs: pass its host as --hosts.")
    first = hosts[0] if hosts else "localhost"
    count = config.processes_per_host or 1
    return Place(int(rank), int(size), first, config.port or DEFAULT_PORT, count)


def place_by_hosts(
    hosts: Sequence[str], index: int, config: LaunchConfig, environ: Mapping[str, str] = os.environ
) -> Place:
    """Returns the place of one of the named hosts.

    Args:
      hosts: all of them, in the order of ranks.
      index: which one this is; -1 finds it.
      config: `port` and `processes_per_host`.
      environ: CUDA_VISIBLE_DEVICES is looked at.

    Raises:
      UserError: it is none of them, or is found twice.
    """
    if len(set(hosts)) < len(hosts):
        raise UserError(f"--hosts={','.join(hosts)} names a host twice: give each once.")
    if index >= len(hosts):
        raise UserError(f"--host_index={index}, but there are {len(hosts)} hosts: count from 0.")
    if index < 0:
        index = _find_here(hosts)
    count = config.processes_per_host or max(1, num_gpus(environ))
    return Place(index, len(hosts), hosts[0], config.port or DEFAULT_PORT, count, hosts)


def _find_here(hosts: Sequence[str]) -> int:
    """Returns which of the hosts this one is, by name, else by the addresses of its cards."""
    name = socket.gethostname()
    for index, host in enumerate(hosts):
        if host in (name, name.partition(".")[0]):
            return index
    own = {a.address for cards in psutil.net_if_addrs().values() for a in cards}
    found = [index for index, host in enumerate(hosts) if _address(host) in own]
    if len(found) != 1:
        raise UserError(
            f"this host, {name}, is not clearly one of {','.join(hosts)}: pass --host_index."
        )
    return found[0]


def _address(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return ""


def slots_of(hosts: Sequence[str], counts: Sequence[int]) -> list[Slot]:
    """Returns all ranks, launcher after launcher.

    Args:
      hosts: of each launcher; under Slurm a host runs several.
      counts: ranks that each of them starts.

    Raises:
      UserError: a host's launchers don't stand together.
    """
    order = list(dict.fromkeys(hosts))
    if sorted(hosts, key=order.index) != list(hosts):
        raise UserError(
            f"the ranks of a host are not neighbours ({','.join(hosts)}): start the step with "
            "srun --distribution=block."
        )
    of_host = [host for host, count in zip(hosts, counts, strict=True) for _ in range(count)]
    sizes = {host: of_host.count(host) for host in order}
    slots = []
    for rank, host in enumerate(of_host):
        local_rank = rank - of_host.index(host)
        across = [other for other in order if sizes[other] > local_rank]
        slots.append(
            Slot(
                host,
                rank,
                len(of_host),
                local_rank,
                sizes[host],
                across.index(host),
                len(across),
            )
        )
    return slots


def tf_config(slots: Sequence[Slot], rank: int, addresses: Mapping[str, str], port: int) -> str:
    """Returns TF_CONFIG of one rank, for --strategy=multi_worker.

    Args:
      slots: of all ranks.
      rank: this one.
      addresses: by host.
      port: of the meeting; the workers' are those after it.
    """
    workers = [f"{addresses[slot.host]}:{port + 1 + slot.local_rank}" for slot in slots]
    return json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})


def environment_of(slot: Slot, address: str, port: int, card: str) -> dict[str, str]:
    """Returns Horovod's variables of one rank, as horovodrun sets them, and NCCL's card.

    Args:
      slot: of the rank.
      address: of launcher 0.
      port: of its rendezvous.
      card: for the traffic.
    """
    return {
        "HOROVOD_HOSTNAME": slot.host,
        "HOROVOD_RANK": str(slot.rank),
        "HOROVOD_SIZE": str(slot.size),
        "HOROVOD_LOCAL_RANK": str(slot.local_rank),
        "HOROVOD_LOCAL_SIZE": str(slot.local_size),
        "HOROVOD_CROSS_RANK": str(slot.cross_rank),
        "HOROVOD_CROSS_SIZE": str(slot.cross_size),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": card,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", f"={card}"),
        "PYTHONUNBUFFERED": "1",
    }
