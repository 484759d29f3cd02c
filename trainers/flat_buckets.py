"""Variables laid end to end in flat buckets that data ranks share evenly. TensorFlow-free.

Source: Rajbhandari et al., ZeRO (arXiv 1910.02054, section 5).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tfbig.config import ModelConfig
from tfbig.variables import variable_rule, variable_specs


class Piece(NamedTuple):
    """What a rank's part of a bucket has of one variable."""

    path: str
    start: int  # first element of the variable, in row-major order
    stop: int
    offset: int  # where it begins in the part


class FlatBucket(NamedTuple):
    """Some variables end to end, padded to equal parts; those that weight decay shrinks first."""

    paths: tuple[str, ...]
    sizes: tuple[int, ...]
    num_decayed: int  # elements
    num_parts: int

    @property
    def part_size(self) -> int:
        """Elements of one part, padding included."""
        return -(-sum(self.sizes) // self.num_parts)

    @property
    def padding(self) -> int:
        """Elements behind the last variable."""
        return self.part_size * self.num_parts - sum(self.sizes)

    def decayed_in(self, part: int) -> int:
        """Returns how many of a part's elements, its first ones, are decayed."""
        return min(max(self.num_decayed - part * self.part_size, 0), self.part_size)

    def pieces(self, part: int) -> list[Piece]:
        """Returns the variables' ranges that lie in a part, in order."""
        begin, end = part * self.part_size, (part + 1) * self.part_size
        found, position = [], 0
        for path, size in zip(self.paths, self.sizes, strict=True):
            start, stop = max(begin, position), min(end, position + size)
            if start < stop:
                found.append(Piece(path, start - position, stop - position, start - begin))
            position += size
        return found


def flat_bucket(
    paths: Sequence[str], sizes: Mapping[str, int], decayed: Mapping[str, bool], num_parts: int
) -> FlatBucket:
    """Returns the bucket of the given variables.

    Args:
      paths: of the variables.
      sizes: elements by path.
      decayed: whether weight decay applies, by path.
      num_parts: ranks that share it.

    >>> bucket = flat_bucket(["a", "b"], {"a": 3, "b": 4}, {"a": False, "b": True}, 2)
    >>> bucket.paths, bucket.part_size, bucket.decayed_in(0), bucket.pieces(1)[0].path
    (('b', 'a'), 4, 4, 'a')
    """
    order = [p for p in paths if decayed[p]] + [p for p in paths if not decayed[p]]
    num_decayed = sum(sizes[path] for path in paths if decayed[path])
    return FlatBucket(tuple(order), tuple(sizes[path] for path in order), num_decayed, num_parts)


def model_sizes(model: ModelConfig) -> dict[str, int]:
    """Returns the elements of each of a model's variables, in forward order."""
    return {spec.path: spec.num_elements for spec in variable_specs(model)}


def flat_buckets(
    sizes: Mapping[str, int], groups: Sequence[Sequence[str]], num_parts: int
) -> list[FlatBucket]:
    """Returns a bucket for each group of paths.

    Args:
      sizes: elements by path.
      groups: which variables lie in a bucket.
      num_parts: ranks that share each.
    """
    decayed = {path: variable_rule(path).decayed for path in sizes}
    return [flat_bucket(paths, sizes, decayed, num_parts) for paths in groups]
