"""Which part of which variable a rank of a mesh holds, counts and writes. TensorFlow-free."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tfbig.config import ModelConfig
from tfbig.variables import VariableSpec, part_of, valid_part_of, variable_rule, variable_specs

TOKEN_TABLE = "embedding_layer/token_emb/embeddings"


class Shard(NamedTuple):
    """A rank's part of one variable."""

    path: str
    global_shape: tuple[int, ...]  # the model's, without padding
    local_shape: tuple[int, ...]  # of the rank's variable, with padding
    start: tuple[int, ...]
    valid_shape: tuple[int, ...]  # of the part of the rank's variable that is no padding
    is_sharded: bool  # the ranks of the tensor group hold different parts
    is_counted: bool  # this rank counts it in sums over the whole model, once for all replicas
    is_counted_in_replica: bool  # this rank counts it in sums over its replica of the model
    is_copy: bool  # the last stage's copy of a tied token embedding

    def shares_gradient(self, sequence_parallel: bool) -> bool:
        """Returns whether ranks of a tensor group each have but a share of a copy's gradient.

        Args:
          sequence_parallel: each of them saw its own positions only.
        """
        partial = sequence_parallel or variable_rule(self.path).partial_gradient
        return partial and not self.is_sharded


def stage_paths(
    model: ModelConfig, block_range: tuple[int, int], is_first: bool, is_last: bool
) -> list[VariableSpec]:
    """Returns the variables of a stage, in forward order.

    Args:
      model: the whole model.
      block_range: (first, last + 1) of its blocks.
      is_first: whether it has the embedding.
      is_last: whether it has the head.
    """
    blocks = range(*block_range)
    chosen = []
    for spec in variable_specs(model):
        part, *rest = spec.path.split("/")
        if part == "embedding_layer":
            keep = is_first or (is_last and model.tied_head and spec.path == TOKEN_TABLE)
        elif part == "transformer_blocks":
            keep = int(rest[0]) in blocks
        else:
            keep = is_last
        if keep:
            chosen.append(spec)
    return chosen


def shard_table(
    model: ModelConfig,
    paths: Iterable[str],
    places: Mapping[str, int],
    sizes: Mapping[str, int],
) -> dict[str, Shard]:
    """Returns a rank's shards by canonical path.

    Args:
      model: the whole model.
      paths: variables that the rank has.
      places: the rank's place along "data", "pipeline" and "tensor".
      sizes: ranks along each axis.
    """
    specs = {spec.path: spec for spec in variable_specs(model)}
    return {path: _shard(specs[path], places, sizes) for path in paths}


def _shard(spec: VariableSpec, places: Mapping[str, int], sizes: Mapping[str, int]) -> Shard:
    parts, index = sizes["tensor"], places["tensor"]
    dim = spec.rule.shard_dim
    is_sharded = dim is not None and parts > 1
    start, valid, local = [0] * len(spec.shape), list(spec.shape), list(spec.shape)
    if is_sharded and dim is not None:
        start[dim], valid[dim] = valid_part_of(spec.shape[dim], parts, index)
        local[dim] = part_of(spec.shape[dim], parts, index)[1]
    is_copy = spec.path == TOKEN_TABLE and places["pipeline"] > 0
    is_counted = (is_sharded or index == 0) and not is_copy
    return Shard(
        path=spec.path,
        global_shape=spec.shape,
        local_shape=tuple(local),
        start=tuple(start),
        valid_shape=tuple(valid),
        is_sharded=is_sharded,
        is_counted=places["data"] == 0 and is_counted,
        is_counted_in_replica=is_counted,
        is_copy=is_copy,
    )
