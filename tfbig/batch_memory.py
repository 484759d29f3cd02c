"""Whether the batches that a process feeds find room in its memory. TensorFlow-free."""

import os

from tfbig.errors import UserError

# A token's id (4 bytes), mask (1) and document (4); two batches at a time, the one in use and the
# next one.
BYTES_PER_TOKEN = 2 * (4 + 1 + 4)


def host_memory_bytes() -> int:
    """Returns the memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_batch_memory(flag: str, rows: int, num_processes: int, sequence_length: int) -> None:
    """Checks that a process can hold its slices of two global batches.

    Args:
      flag: what the batch's size is given by.
      rows: sequences of a global batch.
      num_processes: that share them.
      sequence_length: tokens a sequence feeds.

    Raises:
      UserError: with the arithmetic.
    """
    row_bytes = BYTES_PER_TOKEN * (sequence_length + 1)
    needed, there = rows // num_processes * row_bytes, host_memory_bytes()
    if needed > there:
        most = max(num_processes, there // row_bytes // 2 * num_processes)
        raise UserError(
            f"--{flag}={rows} does not fit: each of {num_processes} processes reads "
            f"{rows // num_processes} sequences of {sequence_length} tokens ahead, "
            f"{needed / 2**30:,.1f} GiB of {there / 2**30:,.1f} GiB of memory. Take at most "
            f"{most}, or start more processes."
        )
