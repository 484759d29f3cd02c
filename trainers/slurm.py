"""The cluster of a multi_worker run as Slurm describes it to each task of a step. TensorFlow-free.

tf.distribute's SlurmClusterResolver needs nvidia-smi, sorts hosts as text (n10 before n2, where
Slurm numbers its tasks the other way round) and hides GPUs after TensorFlow has listed them; so
the addresses are made here.
"""

import os
import re
from collections.abc import Mapping

from tfbig.errors import UserError
from trainers.cluster import Place

NEEDED = (
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_TASKS_PER_NODE",
)
# Below the ports that systems hand out by themselves (32768 and on); jobs that share a node differ.
_FIRST_PORT, _PORTS_OF_A_JOB, _NUM_JOBS = 10_000, 64, 340
_HOW = "start it as `srun -n 2 python -m tfbig.train --strategy=multi_worker`, or set TF_CONFIG"


def in_slurm_step(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether srun started this process."""
    return "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment


def place_from_slurm(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Returns this process's place in its Slurm step, or None outside and in a step of one task.

    Raises:
      UserError: a variable of the step is missing or makes no sense.
    """
    if not in_slurm_step(environment):
        return None
    missing = [name for name in NEEDED if not environment.get(name)]
    if missing:
        raise UserError(
            f"this is a step of Slurm's, but the environment lacks {', '.join(missing)}: {_HOW}."
        )
    rank, num_tasks, job, node = (
        _number(environment, name, default)
        for name, default in (
            ("SLURM_PROCID", None),
            ("SLURM_STEP_NUM_TASKS", None),
            ("SLURM_JOB_ID", "0"),
            ("SLURM_NODEID", "-1"),
        )
    )
    if num_tasks == 1:
        return None
    hosts = expand_hosts(environment["SLURM_STEP_NODELIST"])
    counts = expand_counts(environment["SLURM_STEP_TASKS_PER_NODE"])
    if len(hosts) != len(counts) or sum(counts) != num_tasks or not 0 <= rank < num_tasks:
        raise UserError(
            f"Slurm's variables do not fit together: {', '.join(_shown(environment))}: {_HOW}."
        )
    port = _FIRST_PORT + job % _NUM_JOBS * _PORTS_OF_A_JOB
    # srun's default distribution, block, numbers the tasks of one node after another.
    places = [(number, i) for number, count in enumerate(counts) for i in range(count)]
    if node >= 0 and places[rank][0] != node:
        raise UserError(
            f"Slurm has put task {rank} on node {node}, not on node {places[rank][0]}: start the "
            "step with srun --distribution=block."
        )
    addresses = tuple(f"{hosts[number]}:{port + i}" for number, i in places)
    return Place(addresses, rank)


def has_own_gpus(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether Slurm shows each task only its own GPUs, rather than all of the node's."""
    return bool(
        environment.get("SLURM_GPUS_PER_TASK")
        or "gpu" in environment.get("SLURM_TRES_PER_TASK", "")
        or environment.get("SLURM_GPU_BIND", "none") != "none"
    )


def expand_hosts(text: str) -> list[str]:
    """Returns the hosts of a Slurm node list, in their order.

    Raises:
      UserError: it is none.

    >>> expand_hosts("gpu[08-10],login,r[1-2]n[1,3]")
    ['gpu08', 'gpu09', 'gpu10', 'login', 'r1n1', 'r1n3', 'r2n1', 'r2n3']
    """
    if not re.fullmatch(r"(?:[^\[\],\s]|,(?!,)|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+", text):
        raise UserError(f"SLURM_STEP_NODELIST={text} is no node list: {_HOW}.")
    hosts: list[str] = []
    for part in re.findall(r"(?:[^\[\],]|\[[^\]]*\])+", text):
        names = [""]
        for literal, ranges in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", part):
            choices = [literal] if literal else _expand_ranges(ranges)
            names = [name + choice for name in names for choice in choices]
        hosts += names
    return hosts


def _expand_ranges(text: str) -> list[str]:
    numbers = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        width = len(first)
        numbers += [str(n).zfill(width) for n in range(int(first), int(last or first) + 1)]
    return numbers


def expand_counts(text: str) -> list[int]:
    """Returns the tasks of each node.

    Raises:
      UserError: the text is not as Slurm writes it.

    >>> expand_counts("3(x2),1")
    [3, 3, 1]
    """
    if not re.fullmatch(r"\d+(?:\(x\d+\))?(?:,\d+(?:\(x\d+\))?)*", text):
        raise UserError(f"SLURM_STEP_TASKS_PER_NODE={text} does not count tasks: {_HOW}.")
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in found for _ in range(int(times or 1))]


def _number(environment: Mapping[str, str], name: str, default: str | None) -> int:
    text = environment.get(name) or default or ""
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{name}={text} is no number: {_HOW}.") from None


def _shown(environment: Mapping[str, str]) -> list[str]:
    return [f"{name}={environment[name]}" for name in NEEDED]
