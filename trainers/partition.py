"""Which blocks each pipeline stage holds. TensorFlow-free."""

from tfbig.errors import UserError


def even_partition(num_layers: int, num_stages: int) -> list[tuple[int, int]]:
    """Returns (first, last + 1) of each stage's blocks, the earlier stages taking the rest.

    >>> even_partition(5, 2)
    [(0, 3), (3, 5)]
    """
    if num_stages > num_layers:
        raise UserError(f"{num_stages} stages need at least as many blocks, not {num_layers}.")
    bounds = [-(-num_layers * index // num_stages) for index in range(num_stages + 1)]
    return list(zip(bounds[:-1], bounds[1:], strict=True))
