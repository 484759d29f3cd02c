"""A rank's variables and slots as slices of the model's, for checkpoints of any layout."""

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
import tensorflow as tf

from tfbig.checkpoint_format import LazyArray, Slice
from trainers.base import StateReader
from trainers.tensor_table import Shard

OPTIMIZER, AVERAGE = "optimizer", "ema"


class TensorState:
    """The variables and slots of one rank of a mesh.

    Args:
      shards: which part of which variable is here, by path.
      variables: this rank's, by path, padding included.
      optimizer_state: slots and scalars by checkpoint path, `optimizer/<slot>/<path>`.
      writes_scalars: whether this rank writes what every rank holds.
    """

    def __init__(
        self,
        shards: Mapping[str, Shard],
        variables: Mapping[str, tf.Variable],
        optimizer_state: Mapping[str, tf.Variable],
        writes_scalars: bool,
    ) -> None:
        self._shards, self._writes_scalars = shards, writes_scalars
        self._variables, self._optimizer_state = dict(variables), dict(optimizer_state)

    def slices(self) -> Iterator[Slice]:
        """Yields what this rank holds; together the writers' slices tile everything once."""
        yield from self.slices_of(self._variables | self._optimizer_state)

    def slices_of(self, tensors: Mapping[str, tf.Tensor | tf.Variable]) -> Iterator[Slice]:
        """Yields slices of tensors that are laid out as this rank's variables.

        Args:
          tensors: by path of a variable or slot.
        """
        for path, tensor in tensors.items():
            shard = self._shard(path)
            dtype = tensor.dtype.as_numpy_dtype
            if shard is None:
                array = LazyArray(tensor.shape, dtype, partial(tf.convert_to_tensor, tensor))
                yield Slice(path, tuple(tensor.shape), (), array, self._writes_scalars)
            elif 0 not in shard.valid_shape:

                def load(tensor=tensor, shard=shard) -> np.ndarray:
                    value = np.asarray(tf.convert_to_tensor(tensor))
                    return value[tuple(map(slice, shard.valid_shape))]

                array = LazyArray(shard.valid_shape, dtype, load)
                yield Slice(path, shard.global_shape, shard.start, array, shard.is_counted)

    def load(self, reader: StateReader, weights_only: bool) -> list[str]:
        """Fills this rank's variables; returns the paths that the checkpoint lacks.

        Args:
          reader: of a checkpoint of any layout.
          weights_only: leaves the optimizer as it is.
        """
        wanted = dict(self._variables) | ({} if weights_only else self._optimizer_state)
        missing = [path for path in wanted if not reader.has(path)]
        for path, variable in wanted.items():
            shard = self._shard(path)
            if path in missing:
                continue
            if shard is None:
                variable.assign(reader.read(path))
                continue
            value = np.zeros(shard.local_shape, variable.dtype.as_numpy_dtype)
            if 0 not in shard.valid_shape:
                valid = tuple(map(slice, shard.valid_shape))
                value[valid] = reader.read(path, shard.start, shard.valid_shape)
            variable.assign(value)
        return missing

    def _shard(self, path: str) -> Shard | None:
        """Returns the shard of a variable or of its slot; None for a scalar."""
        if path in self._shards:
            return self._shards[path]
        prefix, _, rest = path.partition("/")
        if prefix == AVERAGE:
            return self._shards[rest]
        assert prefix == OPTIMIZER, path
        return self._shards.get(rest.partition("/")[2])
