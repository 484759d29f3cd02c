"""The mesh of ranks: data, pipeline and tensor axes, and who talks with whom. TensorFlow-free."""

import itertools
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from tfbig.errors import UserError

AXES = {"D": "data", "P": "pipeline", "T": "tensor"}
# SageMaker's names for the two placements it offered for TensorFlow.
PLACEMENTS = {"cluster": "DPT", "spread": "TPD"}


def placement_order(strategy: str) -> str:
    """Returns the axes as a permutation of D, P, T; neighbouring ranks differ in the rightmost.

    Args:
      strategy: "cluster", "spread" or a permutation of D, P, T.

    Raises:
      UserError: it is none of these.

    >>> placement_order("cluster")
    'DPT'
    """
    order = PLACEMENTS.get(strategy, strategy.upper())
    if sorted(order) != sorted(AXES):
        raise UserError(
            f"--placement_strategy={strategy} is not known: it is cluster (DPT), spread (TPD) or"
            " another permutation of the letters D, P and T; neighbouring ranks differ in the last."
        )
    return order


@dataclass(frozen=True)
class Mesh:
    """Where each rank stands.

    Args:
      sizes: ranks along each axis, by "data", "pipeline" and "tensor".
      order: a permutation of D, P, T; the rightmost axis joins neighbouring ranks.
    """

    sizes: Mapping[str, int]
    order: str = "DPT"

    @property
    def size(self) -> int:
        """Ranks in all."""
        return math.prod(self.sizes.values())

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns a rank's place along each axis.

        >>> Mesh({"data": 2, "pipeline": 2, "tensor": 2}).coordinates(5)
        {'tensor': 1, 'pipeline': 0, 'data': 1}
        """
        assert 0 <= rank < self.size, f"rank {rank} of {self.size}"
        places = {}
        for letter in reversed(self.order):
            rank, places[AXES[letter]] = divmod(rank, self.sizes[AXES[letter]])
        return places

    def rank_at(self, **places: int) -> int:
        """Returns the rank at the given place along "data", "pipeline" and "tensor"."""
        rank = 0
        for letter in self.order:
            rank = rank * self.sizes[AXES[letter]] + places[AXES[letter]]
        return rank

    def line(self, axis: str, rank: int) -> tuple[int, ...]:
        """Returns the ranks that differ from `rank` along `axis` alone, in order of their place."""
        places = self.coordinates(rank)
        return tuple(self.rank_at(**places | {axis: place}) for place in range(self.sizes[axis]))

    def lines(self, axis: str) -> list[tuple[int, ...]]:
        """Returns all groups of ranks that differ along `axis` alone."""
        return sorted({self.line(axis, rank) for rank in range(self.size)})

    def model_ranks(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks, ascending, that hold one replica of the model with `rank`."""
        data = self.coordinates(rank)["data"]
        return tuple(r for r in range(self.size) if self.coordinates(r)["data"] == data)

    def ranks_and_sizes(self, rank: int) -> dict[str, int]:
        """Returns mp, pp, tp, dp and rdp rank and size as SageMaker's library defines them.

        mp: the ranks of one replica. dp: the ranks that hold the same stage, tensor shards
        included. rdp: the ranks that hold the same shard of the same stage. So
        pp x dp = mp x rdp = pp x tp x rdp = number of ranks.
        """
        places, sizes = self.coordinates(rank), self.sizes
        stage = [
            r for r in range(self.size) if self.coordinates(r)["pipeline"] == places["pipeline"]
        ]
        return {
            "mp_rank": self.model_ranks(rank).index(rank),
            "mp_size": sizes["pipeline"] * sizes["tensor"],
            "pp_rank": places["pipeline"],
            "pp_size": sizes["pipeline"],
            "tp_rank": places["tensor"],
            "tp_size": sizes["tensor"],
            "dp_rank": stage.index(rank),
            "dp_size": len(stage),
            "rdp_rank": places["data"],
            "rdp_size": sizes["data"],
        }

    def hosts_of_a_tensor_group(self, ranks_per_host: int) -> int:
        """Returns over how many hosts the widest tensor group spreads; hosts hold equal ranks."""
        return max(len({r // ranks_per_host for r in line}) for line in self.lines("tensor"))


def make_mesh(
    num_ranks: int, pipeline_degree: int, tensor_degree: int, placement_strategy: str
) -> Mesh:
    """Returns the mesh of a run; what the two degrees leave over is data parallelism.

    Raises:
      UserError: the degrees don't divide the ranks.
    """
    order = placement_order(placement_strategy)
    for name, degree in (("pipeline", pipeline_degree), ("tensor", tensor_degree)):
        if degree < 1:
            raise UserError(f"--{name}_parallel_degree={degree} must be at least 1.")
    model_ranks = pipeline_degree * tensor_degree
    if num_ranks % model_ranks:
        raise UserError(
            f"{num_ranks} ranks are no multiple of pipeline_parallel_degree x"
            f" tensor_parallel_degree = {pipeline_degree} x {tensor_degree} = {model_ranks}: start"
            f" {max(1, num_ranks // model_ranks) * model_ranks} ranks or change a degree."
        )
    sizes = {
        "data": num_ranks // model_ranks,
        "pipeline": pipeline_degree,
        "tensor": tensor_degree,
    }
    return Mesh(sizes, order)


def warn_of_slow_tensor_groups(mesh: Mesh, ranks_per_host: int) -> None:
    """Says on standard error when tensor groups cross hosts, and what that costs."""
    num_hosts = mesh.hosts_of_a_tensor_group(ranks_per_host)
    if num_hosts > 1:
        # One way, per GPU: NVLink of an A100 300 GB/s; a 400 Gb/s network shared by 8 GPUs.
        ratio = math.floor(300 / (400 / 8 / 8))
        print(
            f"warning: each tensor group spans {num_hosts} hosts: four all-reduces a block cross"
            f" the network, about {ratio} times slower than NVLink on 8-GPU hosts with 400 Gb/s."
            f" Take --tensor_parallel_degree <= {ranks_per_host} and a --placement_strategy that"
            " ends in T.",
            file=sys.stderr,
            flush=True,
        )


def mesh_groups(mesh: Mesh, is_ring: bool, is_tied: bool) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the ranks of every group of the mesh, by axis; the engine drops equal ones.

    Args:
      mesh: of all ranks.
      is_ring: whether the last stage also hands over to the first (interleaved chunks).
      is_tied: whether first and last stage sum the gradients of a tied token embedding.
    """
    groups: list[tuple[str, tuple[int, ...]]] = []
    for line in mesh.lines("pipeline"):
        if len(line) > 1:
            groups += [("pipeline", pair) for pair in itertools.pairwise(line)]
            if is_ring and len(line) > 2:
                groups.append(("pipeline", (line[0], line[-1])))
            if is_tied:
                groups.append(("tied", (line[0], line[-1])))
    for axis in ("data", "tensor"):
        groups += [(axis, line) for line in mesh.lines(axis)]
    return groups
