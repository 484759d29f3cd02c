"""Units of the times that readers take, as smdebug has them."""

import enum


class TimeUnits(enum.IntEnum):
    """What a number of `get_events` counts."""

    SECONDS = 1
    MILLISECONDS = 2
    MICROSECONDS = 3
    NANOSECONDS = 4


_PER_SECOND = {
    TimeUnits.SECONDS: 1.0,
    TimeUnits.MILLISECONDS: 1e3,
    TimeUnits.MICROSECONDS: 1e6,
    TimeUnits.NANOSECONDS: 1e9,
}


def to_seconds(time: float, unit: TimeUnits = TimeUnits.MICROSECONDS) -> float:
    """Returns a time in seconds.

    >>> to_seconds(1500, TimeUnits.MILLISECONDS)
    1.5
    """
    return time / _PER_SECOND[TimeUnits(unit)]
