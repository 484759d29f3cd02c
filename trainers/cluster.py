"""The cluster of a multi_worker run, as TF_CONFIG describes it. TensorFlow-free."""

import json
import os
from collections.abc import Mapping
from typing import NamedTuple

from tfbig.errors import UserError

EXAMPLE = '{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 0}}'


class Place(NamedTuple):
    """Where a process stands in its cluster."""

    addresses: tuple[str, ...]  # host:port of each worker, the chief first
    rank: int

    @property
    def _hosts(self) -> list[str]:
        return [address.rpartition(":")[0] for address in self.addresses]

    @property
    def local_size(self) -> int:
        """Workers on this process's host."""
        return self._hosts.count(self._hosts[self.rank])

    @property
    def local_rank(self) -> int:
        """Which of its host's workers this process is."""
        return self._hosts[: self.rank].count(self._hosts[self.rank])


def place_from_tf_config(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Returns this process's place by TF_CONFIG, or None where that isn't set.

    Raises:
      UserError: it is set, but describes no place in a cluster of workers.
    """
    text = environment.get("TF_CONFIG", "")
    if not text:
        return None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise _wrong(f"is no JSON ({error.msg} at character {error.pos})") from None
    if not isinstance(value, dict) or not isinstance(value.get("cluster"), dict):
        raise _wrong("has no 'cluster'")
    cluster, task = value["cluster"], value.get("task")
    foreign = sorted(set(cluster) - {"chief", "worker"})
    if foreign:
        raise _wrong(f"names {foreign[0]!r}: only 'chief' and 'worker' train")
    if not isinstance(task, dict) or task.get("type") not in cluster:
        raise _wrong("has no 'task' whose 'type' is in the cluster")
    addresses: list[str] = []
    for kind in ("chief", "worker"):
        members = cluster.get(kind, [])
        if not isinstance(members, list) or not all(isinstance(x, str) for x in members):
            raise _wrong(f"names as {kind!r} no list of host:port")
        for member in members:
            port = member.rpartition(":")[2]
            if ":" not in member or not port.isdigit() or not 0 < int(port) < 65536:
                raise _wrong(f"names {member!r}, which is no host:port")
        addresses += members
    repeated = sorted({a for a in addresses if addresses.count(a) > 1})
    if repeated:
        raise _wrong(f"names {repeated[0]} twice")
    index, count = task.get("index"), len(cluster[task["type"]])
    if not isinstance(index, int) or not 0 <= index < count:
        raise _wrong(f"has task index {index!r}, but {count} of type {task['type']!r}")
    first = len(cluster.get("chief", [])) if task["type"] == "worker" else 0
    return Place(tuple(addresses), first + index)


def _wrong(what: str) -> UserError:
    return UserError(f"the environment variable TF_CONFIG {what}. It should look like {EXAMPLE}.")
