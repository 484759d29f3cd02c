"""All-reduce between ranks, by axis of the mesh and between pairs of hosts; their clocks."""

import itertools
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfbig.diagnosis.doctor_config import DoctorConfig
from tfbig.diagnosis.finding import Examined, HostReport
from tfbig.profiler.clock_offset import estimate_offset
from tfbig.shared_folder import sees_rank_0
from trainers.collectives import Engine, Group
from trainers.mesh import Mesh, make_mesh

_REPEATS = 5
_MOST_PAIRS = 28  # every pair of eight hosts; among more, each and the next one
_SLOW = 0.5  # of the median pair's bandwidth
_CLOCK_SECONDS = 1.0
_MEBI = 1 << 20


class Measured(NamedTuple):
    """An all-reduce over one group."""

    name: str
    ranks: tuple[int, ...]
    megabytes_per_second: float  # that each rank sends, as NVIDIA's nccl-tests counts them
    microseconds: float  # of the smallest tensor


def host_pairs(hosts: Sequence[str]) -> list[tuple[int, int]]:
    """Returns the first ranks of each pair of hosts; of neighbours where there are many.

    Args:
      hosts: of each rank.

    >>> host_pairs(["a", "a", "b", "c"])
    [(0, 2), (0, 3), (2, 3)]
    """
    first = [hosts.index(host) for host in dict.fromkeys(hosts)]
    pairs = list(itertools.combinations(first, 2))
    return pairs if len(pairs) <= _MOST_PAIRS else list(itertools.pairwise([*first, first[0]]))


def groups_to_measure(mesh: Mesh, hosts: Sequence[str]) -> list[tuple[str, tuple[int, ...]]]:
    """Returns axis and ranks of every group, those of a pair of hosts as "pair".

    Args:
      mesh: of all ranks.
      hosts: of each rank.
    """
    groups = [
        (axis, line) for axis in mesh.sizes if mesh.sizes[axis] > 1 for line in mesh.lines(axis)
    ]
    pairs = [tuple(sorted(pair)) for pair in host_pairs(hosts)]
    return groups + [("pair", pair) for pair in pairs]


def measure(engine: Engine, hosts: Sequence[str], megabytes: int) -> list[Measured]:
    """Returns what this rank's groups reached; all ranks call it together.

    The groups of one axis run side by side, as in a step; pairs of hosts one after another.

    Args:
      engine: made with `groups_to_measure`.
      hosts: of each rank.
      megabytes: of the tensor.
    """
    measured = []
    order: list[list[tuple[int, Group]]] = [
        [(number, group) for number, group in enumerate(engine.groups) if group.axis == axis]
        for axis in ("data", "pipeline", "tensor")
    ]
    order += [[(n, g)] for n, g in enumerate(engine.groups) if g.axis == "pair"]
    for together in filter(None, order):
        engine.agree(0, "max")  # all ranks begin at once, and nobody else talks
        for number, group in together:
            if group.rank >= 0:
                axis, ranks = group.axis, group.ranks
                name = "-".join(hosts[r] for r in ranks) if axis == "pair" else axis
                measured.append(Measured(name, ranks, *_time(group, number, megabytes)))
    engine.agree(0, "max")
    return measured


def _time(group: Group, number: int, megabytes: int) -> tuple[float, float]:
    """Returns MB/s of a large all-reduce and microseconds of a small one."""
    large = _seconds(group, f"doctor_{number}_large", megabytes * _MEBI // 4)
    small = _seconds(group, f"doctor_{number}_small", 1)
    share = 2 * (group.size - 1) / group.size
    return share * megabytes * _MEBI / 1e6 / max(1e-9, large), 1e6 * small


def _seconds(group: Group, name: str, elements: int) -> float:
    run = tf.function(lambda x: group.all_reduce(x, name), autograph=False)
    tensor = tf.ones([elements])
    run(tensor)
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        run(tensor).numpy()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def describe(measured: Sequence[Measured], min_bandwidth: float) -> Examined:
    """Returns findings about all groups of the cluster.

    Args:
      measured: each group once.
      min_bandwidth: megabytes per second below which a group is a problem.
    """
    found = Examined()
    is_pair = [one.name not in ("data", "pipeline", "tensor") for one in measured]
    pairs = [one for one, pair in zip(measured, is_pair, strict=True) if pair]
    usual = statistics.median([one.megabytes_per_second for one in pairs]) if pairs else 0.0
    for one, pair in zip(measured, is_pair, strict=True):
        what = one.name if pair else f"{one.name} axis, ranks {_ranks(one.ranks)}"
        text = f"{what}: {one.megabytes_per_second:,.0f} MB/s, {one.microseconds:,.0f} us"
        if one.megabytes_per_second < min_bandwidth:
            advice = f"below --min_bandwidth={min_bandwidth:g}: look at the cards they use"
            found.add("bandwidth", "problem", text, advice)
        elif pair and one.megabytes_per_second < _SLOW * usual:
            advice = f"less than half of the median pair's {usual:,.0f}: look at these two hosts"
            found.add("bandwidth", "warning", text, advice)
        else:
            found.add("bandwidth", "fine", text)
    return found


def _ranks(ranks: Sequence[int]) -> str:
    shown = [str(rank) for rank in ranks]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:3], "...", shown[-1]])


def examine_clock(engine: Engine) -> Examined:
    """Returns whether this rank's clock is rank 0's; all ranks call it together."""
    found, offset = Examined(), estimate_offset(engine)
    if abs(offset.seconds) - offset.error > _CLOCK_SECONDS:
        text = f"the clock is {offset.seconds:+.1f} s from rank 0's"
        found.add("network", "problem", text, "run chrony or systemd-timesyncd on every host")
    return found


def examine_shared_folder(engine: Engine, folder: Path) -> Examined:
    """Returns whether this rank sees what rank 0 writes; all ranks call it together.

    Args:
      engine: of all ranks.
      folder: that exists on rank 0: the run's, or the nearest above it.
    """
    found = Examined()
    depth = int(engine.broadcast(np.array([len(folder.parts)], np.int64))[0])
    shared = Path(*folder.parts[:depth])
    sees = sees_rank_0(engine, shared)
    if not sees:
        text = f"this host does not see {shared} of rank 0's host"
        found.add("disk", "problem", text, "put --run_dir on a file system that all hosts share")
    return found


def gather_reports(engine: Engine, report: HostReport) -> list[HostReport]:
    """Returns all ranks' reports, on every rank."""
    return [HostReport.from_dict(values) for values in gather_json(engine, report.to_dict())]


def gather_json(engine: Engine, value: object) -> list:
    """Returns what every rank holds, in order of rank.

    Args:
      engine: of all ranks.
      value: of this rank, ready for JSON.
    """
    data = json.dumps(value).encode()
    length = engine.agree(-(-len(data) // 8), "max")
    words = np.frombuffer(data.ljust(8 * length), np.int64)  # JSON doesn't mind blanks
    everyone = engine.gather(words).reshape([-1, length])  # (ranks, length)
    return [json.loads(row.tobytes()) for row in everyone]


def each_once(gathered: Sequence[Sequence[Mapping]]) -> list[Measured]:
    """Returns each group once, with the slowest of its ranks' numbers.

    Args:
      gathered: by rank, `Measured._asdict()` of its groups.
    """
    groups: dict[tuple[str, tuple[int, ...]], Measured] = {}
    for values in itertools.chain.from_iterable(gathered):
        one = Measured(**values)._replace(ranks=tuple(values["ranks"]))
        old = groups.get((one.name, one.ranks), one)
        speed = min(old.megabytes_per_second, one.megabytes_per_second)
        slowest = max(old.microseconds, one.microseconds)
        groups[one.name, one.ranks] = Measured(one.name, one.ranks, speed, slowest)
    return list(groups.values())


def mesh_of(config: DoctorConfig, num_ranks: int) -> Mesh:
    """Returns the mesh that the run will have.

    Raises:
      UserError: the degrees do not divide the ranks.
    """
    return make_mesh(
        num_ranks,
        config.pipeline_parallel_degree,
        config.tensor_parallel_degree,
        config.placement_strategy,
    )
