"""Seconds of collectives between the ranks of a mesh axis. TensorFlow-free.

Ring algorithms: an all-reduce of S bytes over n ranks moves 2 (n - 1) / n S over the slowest link
of the ring (Patarasuk and Yuan 2009), a gather or a scatter half of it. Groups that cross nodes
share a node's network cards evenly; latency grows with the ranks in a node and, by trees, with the
logarithm of the nodes.
"""

import itertools
import math
from dataclasses import dataclass

from tfbig.planner.cluster import Cluster
from trainers.mesh import Mesh


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
    """Returns the line of rank 0 along an axis."""
    return line_between(cluster, mesh.line(axis, 0))


def line_between(cluster: Cluster, ranks: tuple[int, ...]) -> Line:
    """Returns the line of the given ranks; all groups of their kind talk at the same time."""
    per_node = cluster.devices_per_node
    nodes = len({rank // per_node for rank in ranks})
    here = len(ranks) / nodes
    bandwidth = cluster.device.link_bandwidth * cluster.link_fraction
    latency = max(0.0, here - 1) * cluster.link_latency
    if nodes > 1:
        share = here / min(per_node, cluster.num_devices)
        network = cluster.network_bandwidth * cluster.network_fraction * share
        bandwidth = min(bandwidth, network)
        latency += math.ceil(math.log2(nodes)) * cluster.network_latency
    return Line(len(ranks), nodes, bandwidth, latency)


def neighbours(cluster: Cluster, mesh: Mesh) -> Line:
    """Returns the slowest pair of consecutive pipeline ranks, as others of the line talk too."""
    line = mesh.line("pipeline", 0)
    pairs = [line_between(cluster, pair) for pair in itertools.pairwise(line)]
    if not pairs:
        return Line(1, 1, math.inf, 0.0)
    slowest = min(pairs, key=lambda pair: pair.bandwidth)
    if slowest.nodes == 1:
        return slowest
    # Of a node's ranks, those that face another node share its cards.
    per_node = min(cluster.devices_per_node, cluster.num_devices)
    crossing = sum(
        1
        for rank in range(per_node)
        if (place := mesh.coordinates(rank))["pipeline"] + 1 < mesh.sizes["pipeline"]
        and mesh.rank_at(**place | {"pipeline": place["pipeline"] + 1}) // per_node > 0
    )
    network = cluster.network_bandwidth * cluster.network_fraction / max(1, crossing)
    link = cluster.device.link_bandwidth * cluster.link_fraction
    return Line(2, 2, min(link, network), cluster.network_latency)
