"""Seconds of collectives between the ranks of a mesh axis. TensorFlow-free.

Ring algorithms: an all-reduce of S bytes over n ranks moves 2 (n - 1) / n S over the slowest link
of the ring (Patarasuk and Yuan 2009), a gather or a scatter half of it. Groups that cross nodes
share a node's network cards evenly; latency grows with the ranks in a node and, by trees, with the
logarithm of the nodes.
"""

import collections
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tfbig.planner.cluster import Cluster
from trainers.mesh import AXES, Mesh


@dataclass(frozen=True)
class Line:
    """The ranks along one axis of a mesh.

    Args:
      size: ranks.
      nodes: that they spread over.
      bandwidth: bytes/s of the ring's slowest link, one way.
      latency: seconds of one trip around.
    """

    size: int
    nodes: int
    bandwidth: float
    latency: float

    def all_reduce(self, num_bytes: float) -> float:
        """Returns the seconds of a sum that every rank gets."""
        return 2 * self.all_gather(num_bytes)

    def all_gather(self, num_bytes: float) -> float:
        """Returns the seconds of gathering, or scattering sums of, `num_bytes` in all."""
        if self.size == 1:
            return 0.0
        return self.latency + (self.size - 1) / self.size * num_bytes / self.bandwidth


def line_of(cluster: Cluster, mesh: Mesh, axis: str) -> Line:
    """Returns the slowest of an axis' lines, for which all others wait; all talk at once."""
    size, stride, per_node = mesh.sizes[axis], stride_of(mesh, axis), cluster.devices_per_node
    shapes: set[tuple[tuple[int, ...], int]]  # ranks on each node, lines that share its cards
    if per_node % (size * stride) == 0:
        shapes = {((size,), 0)}
    elif stride % per_node == 0:
        shapes = {((1,) * size, per_node)}
    elif per_node % stride == 0 and size * stride % per_node == 0:
        here = per_node // stride
        shapes = {((here,) * (size // here), stride)}
    else:
        shapes = _shapes(mesh.size, size, stride, per_node)
    lines = (_line(cluster, on_node, sharing) for on_node, sharing in shapes)
    return min(lines, key=lambda line: (line.bandwidth, -line.latency))


def _shapes(
    num_ranks: int, size: int, stride: int, per_node: int
) -> set[tuple[tuple[int, ...], int]]:
    """Returns (ranks on each node, lines that share the fullest one's cards) of any lines."""
    period = math.lcm(stride, per_node)
    repeats, rest = divmod(size * stride, period)
    if repeats > 1 and not rest:  # along each line nodes repeat themselves
        begun = _counted(period, period // stride, stride, per_node)
        return {(on_node * repeats, sharing) for on_node, sharing in begun}
    return _counted(_first(num_ranks, size * stride, per_node), size, stride, per_node)


def _first(num_ranks: int, block: int, per_node: int) -> int:
    """Returns the ranks after which blocks of them lie on nodes as the first ones do."""
    period = math.lcm(block, per_node)
    return num_ranks if num_ranks % period else period


def _counted(
    num_ranks: int, size: int, stride: int, per_node: int
) -> set[tuple[tuple[int, ...], int]]:
    """Returns the same by counting each rank."""
    places = [
        collections.Counter(r // per_node for r in range(begin, begin + size * stride, stride))
        for first in range(0, num_ranks, size * stride)
        for begin in range(first, first + stride)
    ]
    # Of lines that cross nodes, those that meet on one share its network cards.
    crossing = collections.Counter(node for line in places if len(line) > 1 for node in line)
    return {
        (tuple(line.values()), max((crossing[node] for node in line), default=0)) for line in places
    }


def stride_of(mesh: Mesh, axis: str) -> int:
    """Returns how far apart neighbours along an axis are, in ranks."""
    order = [AXES[letter] for letter in mesh.order]
    return math.prod(mesh.sizes[name] for name in order[order.index(axis) + 1 :])


def _line(cluster: Cluster, on_node: Sequence[int], sharing: int) -> Line:
    """Returns the line of so many ranks on each node; so many lines share a node's cards."""
    size, nodes = sum(on_node), len(on_node)
    bandwidth = cluster.device.link_bandwidth * cluster.link_fraction
    latency = (max(on_node) - 1) * cluster.link_latency
    if nodes > 1:
        network = cluster.network_bandwidth * cluster.network_fraction / sharing
        bandwidth = min(bandwidth, network)
        latency += math.ceil(math.log2(nodes)) * cluster.network_latency
    return Line(size, nodes, bandwidth, latency)


def ends_of_pipelines(cluster: Cluster, mesh: Mesh) -> Line:
    """Returns the slowest pair of a pipeline's first and last rank; all pairs talk at once."""
    size, stride = mesh.sizes["pipeline"], stride_of(mesh, "pipeline")
    per_node = cluster.devices_per_node
    pairs = (
        (begin // per_node, (begin + (size - 1) * stride) // per_node)
        for first in range(0, mesh.size, size * stride)
        for begin in range(first, first + stride)
    )
    if all(here == there for here, there in pairs):
        return _line(cluster, (2,), 0)
    # As if all ranks of a node talked: what else is in a node waits for its own sums meanwhile.
    return _line(cluster, (1, 1), min(per_node, cluster.num_devices))


def neighbours(cluster: Cluster, mesh: Mesh) -> Line:
    """Returns the slowest pair of consecutive pipeline ranks, as others of the line talk too."""
    size, stride = mesh.sizes["pipeline"], stride_of(mesh, "pipeline")
    link = cluster.device.link_bandwidth * cluster.link_fraction
    if size == 1:
        return Line(1, 1, math.inf, 0.0)
    facing = _facing(mesh.size, size, stride, cluster.devices_per_node)
    if not facing:
        return Line(2, 1, link, cluster.link_latency)
    network = cluster.network_bandwidth * cluster.network_fraction / facing
    return Line(2, 2, min(link, network), cluster.network_latency)


def _facing(num_ranks: int, size: int, stride: int, per_node: int) -> int:
    """Returns the most ranks of one node whose next rank along a line is on another one.

    These share the node's cards. Places that repeat themselves from node to node are not counted.
    """
    if per_node % (size * stride) == 0:
        return 0
    if stride % per_node == 0:
        return per_node
    if per_node % stride == 0 and size * stride % per_node == 0:
        return stride
    facing = collections.Counter(
        rank // per_node
        for rank in range(_first(num_ranks, size * stride, per_node))
        if rank // stride % size + 1 < size and rank // per_node != (rank + stride) // per_node
    )
    return max(facing.values(), default=0)
