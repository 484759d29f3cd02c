"""What the kernel is told about mapped files, so that network mounts read what is needed."""

import mmap

import numpy as np


def advise_random(mapped: mmap.mmap) -> None:
    """Tells the kernel not to read around a fault: network mounts read megabytes around each."""
    if hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)


def advise_needed(mapped: mmap.mmap, starts: np.ndarray, size: int) -> None:
    """Asks the kernel to read some places of a file in the background.

    Args:
      mapped: the file.
      starts: (n,) first byte of each place.
      size: bytes of a place.
    """
    if not hasattr(mmap, "MADV_WILLNEED"):
        return
    total = len(mapped)
    pages = np.unique(starts // mmap.PAGESIZE) * mmap.PAGESIZE
    for start in pages.tolist():
        length = min(size + mmap.PAGESIZE, total - start)
        mapped.madvise(mmap.MADV_WILLNEED, start, length)
