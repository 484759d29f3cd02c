"""The model as a row of units, each of which is gathered, used and let go by itself. TF-free."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tfbig.config import ModelConfig
from tfbig.variables import is_trained, variable_specs
from trainers.tensor_table import TOKEN_TABLE


class Unit(NamedTuple):
    """The embedding, some consecutive blocks, or the head."""

    trained: tuple[str, ...]
    frozen: tuple[str, ...]
    blocks: tuple[int, int]  # (first, last + 1), empty but for blocks
    has_embedding: bool = False
    has_head: bool = False

    @property
    def paths(self) -> tuple[str, ...]:
        """All of its variables, those that are trained first."""
        return self.trained + self.frozen


def model_units(model: ModelConfig, group_size: int, freeze: Sequence[str] = ()) -> list[Unit]:
    """Returns the units of a whole model, in order of the forward pass.

    Args:
      model: its description.
      group_size: consecutive blocks of one unit.
      freeze: of OptimizerConfig.
    """

    def parted(paths: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        trained = tuple(path for path in paths if is_trained(path, model, freeze))
        return trained, tuple(path for path in paths if path not in trained)

    paths = [spec.path for spec in variable_specs(model)]
    embedding = [path for path in paths if path.startswith("embedding_layer/")]
    units = [Unit(*parted(embedding), (0, 0), has_embedding=True)]
    for first in range(0, model.num_layers, group_size):
        stop = min(first + group_size, model.num_layers)
        prefixes = tuple(f"transformer_blocks/{index}/" for index in range(first, stop))
        own = [path for path in paths if path.startswith(prefixes)]
        units.append(Unit(*parted(own), (first, stop)))
    head = [path for path in paths if path.startswith(("final_norm/", "dense/"))]
    head += [TOKEN_TABLE] if model.tied_head else []
    units.append(Unit(*parted(head), (0, 0), has_head=True))
    return units


def unit_buckets(units: Iterable[Sequence[str]]) -> list[list[str]]:
    """Returns paths that travel together: each unit's, and those that two units use by themselves.

    Args:
      units: the trained paths of each unit, or the frozen ones.

    >>> unit_buckets([("x", "y"), ("z", "x")])
    [['x'], ['y'], ['z']]
    """
    users: dict[str, list[int]] = {}
    for index, paths in enumerate(units):
        for path in paths:
            users.setdefault(path, []).append(index)
    buckets: dict[tuple[int, ...], list[str]] = {}
    for path, indices in users.items():
        buckets.setdefault(tuple(indices), []).append(path)
    return list(buckets.values())
