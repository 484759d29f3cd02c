"""What a stage takes: seconds of the clock, and of the process on its cores."""

import time
from typing import Any, NamedTuple


class Clocks(NamedTuple):
    """A moment, or a time between two, by both clocks."""

    wall: float = 0.0
    cpu: float = 0.0  # of all threads, user and system

    @classmethod
    def now(cls) -> "Clocks":
        """Returns this moment."""
        return cls(time.perf_counter(), time.process_time())

    @classmethod
    def of(cls, value: Any) -> "Clocks":
        """Returns a time as a result's JSON has it; earlier versions stored one number."""
        return cls(*value) if isinstance(value, (list, tuple)) else cls(value, value)

    def __add__(self, other: tuple[Any, ...]) -> "Clocks":
        return Clocks(self.wall + other[0], self.cpu + other[1])

    def __sub__(self, other: "Clocks") -> "Clocks":
        return Clocks(self.wall - other.wall, self.cpu - other.cpu)
