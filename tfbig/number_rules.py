"""What every number of a configuration must satisfy, by its type alone. TensorFlow-free.

Steps, sizes and samples are counted in 64 bits, and the model computes in float32.
"""

import dataclasses
import math
import struct
from collections.abc import Iterator

SMALLEST_FLOAT32 = 2.0**-126  # TensorFlow's kernels take anything smaller for 0
LARGEST_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127


def as_float32(value: float) -> float:
    """Returns what float32 makes of a number.

    >>> as_float32(1e-60), as_float32(1 - 1e-12), as_float32(1e39)
    (0.0, 1.0, inf)
    """
    if math.isnan(value) or abs(value) < SMALLEST_FLOAT32:
        return value if math.isnan(value) else 0.0
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def way_out(section: object, name: str) -> str:
    """Returns what ends a line on a field's value: one that works; presets have others."""
    default = getattr(type(section)(), name)
    return f"give e.g. --{name}={default}."


def integer_problem(name: str, value: object) -> str | None:
    """Returns a line for a whole number beyond 64 bits, None for any other value."""
    if not isinstance(value, int) or -(2**63) <= value < 2**63:
        return None
    return (
        f"--{name}={_short(value)} is beyond 64 bits: a whole number lies between -2^63 and "
        "2^63 - 1 = 9,223,372,036,854,775,807; give one of these."
    )


def float32_problem(name: str, value: object) -> str | None:
    """Returns a line for a number that float32 makes 0 or infinite, None for any other value."""
    if not isinstance(value, float) or not math.isfinite(value) or value == 0:
        return None
    rounded = as_float32(value)
    if math.isinf(rounded):
        return (
            f"--{name}={value} is infinite in float32, in which it is used: give at "
            f"most {LARGEST_FLOAT32:.2g}."
        )
    if rounded == 0:
        return (
            f"--{name}={value} is 0 in float32, in which it is used: give 0, or at least "
            f"{SMALLEST_FLOAT32:.2g}."
        )
    return None


def integer_problems(section: object) -> Iterator[str]:
    """Yields a line for each field of a config dataclass that is beyond 64 bits."""
    for item in dataclasses.fields(section):  # type: ignore[arg-type]
        if problem := integer_problem(item.name, getattr(section, item.name)):
            yield problem


def float32_problems(section: object) -> Iterator[str]:
    """Yields a line for each field of a config dataclass that float32 cannot hold."""
    for item in dataclasses.fields(section):  # type: ignore[arg-type]
        if problem := float32_problem(item.name, getattr(section, item.name)):
            yield problem


def _short(value: int) -> str:
    return str(value) if abs(value) < 10**40 else f"{'-' * (value < 0)}{str(abs(value))[:12]}..."
