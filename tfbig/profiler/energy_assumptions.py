"""What stands in for a meter where a run's energy is estimated. TensorFlow-free."""

from typing import NamedTuple


class Assumptions(NamedTuple):
    """Powers and factors; flags of `tfbig report` replace them."""

    watts_per_core: float = 8.0  # of a core in full use, where no RAPL counter is readable
    watts_per_gigabyte: float = 0.375  # of memory
    overhead: float = 1.2  # the data centre's energy over the computers' (PUE)
    kilograms_per_kwh: float = 0.48  # CO2 of the grid; about the world's mean
