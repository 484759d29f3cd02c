"""Whether the ranks of a run see one and the same folder."""

import contextlib
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np


def sees_rank_0(ranks: Any, folder: Path, patience: float = 5.0) -> bool:
    """Returns whether this rank sees a file that rank 0 makes and removes again; all call it.

    Args:
      ranks: a trainer or an engine, whose `rank`, `agree` and `broadcast` are used.
      folder: that rank 0 has; where it can't write, no rank sees it.
      patience: seconds to wait for a network file system to show a new file.
    """
    token = int(ranks.broadcast(np.array([uuid.uuid4().int & (2**62 - 1)], np.int64))[0])
    probe = folder / f".shared-{token}"
    if ranks.rank == 0:
        with contextlib.suppress(OSError):  # whoever needs the folder says what is wrong
            probe.touch()
    ranks.agree(0, "max")  # rank 0 has written it
    deadline = time.monotonic() + patience
    while not probe.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    sees = probe.exists()
    ranks.agree(0, "max")  # all have looked
    if ranks.rank == 0:
        probe.unlink(missing_ok=True)
    return sees
