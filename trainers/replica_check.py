"""Whether ranks that must hold the same weights do: a checksum of each variable's bits."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfbig.config import ModelConfig
from tfbig.variables import variable_specs
from trainers.collectives import Engine
from trainers.mesh import Mesh

SLICE = 1 << 20  # elements that are summed at a time, so that no copy of a weight is made
MOST_NAMED = 8  # variables
_LOWEST, _HIGHEST = np.iinfo(np.int64).min, np.iinfo(np.int64).max
_BITS = {2: tf.uint16, 4: tf.int32, 8: tf.int64}


class ReplicaCheck:
    """Compares variables over all ranks that hold one of the same name.

    Replicas that began alike and got the same summed gradients are alike bit for bit; one that
    isn't has had its memory changed, or an update that the others had not.

    Args:
      engine: whose ranks take part.
      names: of all variables of all ranks, in the same order on each.
      own: this rank's, by name.
    """

    def __init__(
        self, engine: Engine, names: Sequence[str], own: Mapping[str, tf.Variable]
    ) -> None:
        assert set(own) <= set(names)
        self._engine, self._names, self._own = engine, list(names), dict(own)
        self._sums = tf.function(self._sums_graph, autograph=False)

    def differing(self) -> list[tuple[str, list[int]]]:
        """Returns variables that differ and the ranks that most others don't agree with.

        Every rank calls it and gets the same. Two ranks that differ are named both.
        """
        if not self._names:
            return []
        here = np.array([name in self._own for name in self._names])
        sums = np.zeros(len(self._names), np.int64)
        if self._own:
            sums[here] = self._sums().numpy()
        low = self._engine.extreme(np.where(here, sums, _HIGHEST), "min")
        high = self._engine.extreme(np.where(here, sums, _LOWEST), "max")
        wrong = np.flatnonzero(low < high)[:MOST_NAMED]
        if not len(wrong):
            return []
        own = np.stack([here[wrong], sums[wrong]], axis=1)  # (variables, 2)
        everyone = self._engine.gather(own.astype(np.int64).reshape(-1))
        everyone = everyone.reshape([-1, len(wrong), 2])  # (ranks, variables, 2)
        return [
            (self._names[index], minority(everyone[:, place])) for place, index in enumerate(wrong)
        ]

    def _sums_graph(self) -> tf.Tensor:
        """Returns the checksums (own variables,) int64."""
        return tf.stack([checksum(self._own[name]) for name in self._names if name in self._own])


def differing_copies(names: Sequence[str], sums: np.ndarray) -> list[tuple[str, list[int]]]:
    """Returns variables whose copies differ, and those that most others don't agree with.

    Args:
      names: of the variables.
      sums: (copies, variables) int64, their checksums.

    >>> differing_copies(["a", "b"], np.array([[1, 5], [1, 7], [1, 5]]))
    [('b', [1])]
    """
    wrong = np.flatnonzero((sums != sums[0]).any(axis=0))[:MOST_NAMED]
    here = np.ones(len(sums), np.int64)
    return [(names[i], minority(np.stack([here, sums[:, i]], axis=1))) for i in wrong]


def mesh_check(
    engine: Engine, model: ModelConfig, mesh: Mesh, own: Mapping[str, tf.Variable]
) -> ReplicaCheck:
    """Returns the check of a mesh, where equal shards of a variable are compared.

    Args:
      engine: of all ranks.
      model: the whole model.
      mesh: of the ranks.
      own: this rank's variables, by path.
    """
    degree, place = mesh.sizes["tensor"], mesh.coordinates(engine.rank)["tensor"]

    def name(path: str, place: int) -> str:
        return path if degree == 1 else f"{path} (tensor shard {place})"

    names = [name(spec.path, p) for spec in variable_specs(model) for p in range(degree)]
    return ReplicaCheck(engine, names, {name(path, place): own[path] for path in own})


def checksum(variable: tf.Variable) -> tf.Tensor:
    """Returns a scalar int64 that any change of any element's bits changes.

    Each element's bits are multiplied by an odd number of its own and summed modulo 2^64.
    """
    flat = tf.reshape(variable, [-1])
    length = flat.shape[0]

    def add(start: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        part = flat[start : start + SLICE]
        bits = tf.cast(tf.bitcast(part, _BITS[part.dtype.size]), tf.int64)
        places = tf.range(tf.cast(tf.size(part), tf.int64)) + tf.cast(start, tf.int64)
        return start + SLICE, total + tf.reduce_sum(bits * (2 * places + 1))

    zero = tf.constant(0, tf.int64)
    return tf.while_loop(lambda start, _: start < length, add, (tf.constant(0), zero))[1]


def minority(found: np.ndarray) -> list[int]:
    """Returns the ranks whose value is not the most frequent one; all of them where none is.

    Args:
      found: (ranks, 2): whether a rank has a value, and the value.

    >>> minority(np.array([[1, 5], [1, 7], [0, 0], [1, 5]]))
    [1]
    """
    holders = [rank for rank, (is_here, _) in enumerate(found) if is_here]
    counts = Counter(int(found[rank, 1]) for rank in holders)
    (first, most), *rest = counts.most_common()
    if rest and rest[0][1] == most:
        return holders
    return [rank for rank in holders if found[rank, 1] != first]
