"""Where a process stands among hosts, as its launcher set it. TensorFlow-free."""

import json
import os
import socket
from collections.abc import Mapping
from typing import NamedTuple

# Names by which Horovod, Open MPI and Slurm tell a process its place on its host, and its host's.
_LOCAL_RANK = (
    "HOROVOD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "SLURM_LOCALID",
)
_LOCAL_SIZE = (
    "HOROVOD_LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_NTASKS_PER_NODE",
)
_HOST_INDEX = ("HOROVOD_CROSS_RANK", "OMPI_COMM_WORLD_NODE_RANK", "SLURM_NODEID")


class HostPlace(NamedTuple):
    """A process on its host."""

    host_index: int  # of its host, counted from 0
    local_rank: int  # among the processes of its host
    hostname: str
    local_size: int = 1  # processes of its host

    @property
    def node_id(self) -> str:
        """The host's name in files: algo-1, algo-2, as SageMaker counts them."""
        return f"algo-{self.host_index + 1}"


def host_place(environment: Mapping[str, str] = os.environ) -> HostPlace:
    """Returns this process's place; without a launcher it is alone on the first host."""
    hostname = socket.gethostname()
    local, host = _first(_LOCAL_RANK, environment), _first(_HOST_INDEX, environment)
    if local is not None:
        return HostPlace(host or 0, local, hostname, _first(_LOCAL_SIZE, environment) or 1)
    workers, index = _cluster(environment)
    if not workers:
        return HostPlace(0, 0, hostname)
    hosts = [worker.rpartition(":")[0] for worker in workers]
    distinct = list(dict.fromkeys(hosts))
    here = hosts[index]
    return HostPlace(distinct.index(here), hosts[:index].count(here), hostname, hosts.count(here))


def _first(names: tuple[str, ...], environment: Mapping[str, str]) -> int | None:
    found = (environment[name] for name in names if environment.get(name, "").isdigit())
    return next((int(text) for text in found), None)


def _cluster(environment: Mapping[str, str]) -> tuple[list[str], int]:
    """Returns the workers of TF_CONFIG and this process's index; a damaged one has none."""
    try:
        config = json.loads(environment.get("TF_CONFIG") or "{}")
        cluster, task = config["cluster"], config["task"]
        chief, workers = cluster.get("chief", []), cluster.get("worker", [])
        index = int(task["index"]) + (len(chief) if task["type"] == "worker" else 0)
        everyone = [*chief, *workers]
        return (everyone, index) if index < len(everyone) else ([], 0)
    except (ValueError, TypeError, KeyError, AttributeError):
        return [], 0
