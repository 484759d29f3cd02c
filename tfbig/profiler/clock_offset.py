"""How far a rank's clock is from rank 0's, from collectives that all ranks enter before any leaves.

A rank leaves such a collective after every rank has entered it. With a the entry and b the exit on
each clock, the offset of this rank's clock (this minus rank 0's) so lies in
[a_here - b_zero, b_here - a_zero]; several rounds narrow it (as Cristian's algorithm does,
doi.org/10.1007/BF01784024).
"""

import time
from typing import Any, NamedTuple

import numpy as np

_ROUNDS = 8


class ClockOffset(NamedTuple):
    """An estimate with its bound."""

    seconds: float  # this rank's clock minus rank 0's
    error: float  # the true offset is at most this far from it


def offset_between(here: np.ndarray, zero: np.ndarray) -> ClockOffset:
    """Returns the offset from entries and exits.

    Args:
      here: (rounds, 2) seconds since 1970 at which this rank entered and left each collective.
      zero: (rounds, 2), the same of rank 0.
    """
    low = float((here[:, 0] - zero[:, 1]).max())
    high = float((here[:, 1] - zero[:, 0]).min())
    # A clock that was set in between leaves no offset that fits all rounds.
    return ClockOffset((low + high) / 2, abs(high - low) / 2)


def estimate_offset(trainer: Any) -> ClockOffset:
    """Returns this rank's offset; all ranks call it together.

    Args:
      trainer: whose engine runs.
    """
    if trainer.size == 1:
        return ClockOffset(0.0, 0.0)
    times = np.zeros([_ROUNDS, 2])
    for index in range(_ROUNDS):
        times[index, 0] = time.time()
        trainer.agree(0, "max")
        times[index, 1] = time.time()
    # Whole microseconds as integers: an engine may hold floats in 32 bits.
    microseconds = np.round(times * 1e6).astype(np.int64)
    zero = trainer.broadcast(microseconds)
    return ClockOffset(0.0, 0.0) if trainer.rank == 0 else offset_between(times, zero / 1e6)
