"""What Horovod's stall inspector says of a hang: which collectives wait for which ranks.

It has no interface: the lowest rank of each group writes to standard error, from C++, every
HOROVOD_STALL_CHECK_TIME_SECONDS.
"""

import os
import tempfile
import time

CHECK_VARIABLE = "HOROVOD_STALL_CHECK_TIME_SECONDS"
# Horovod's own is 60. It looks that often, and a collective that it had cached it takes out of its
# cache first, and counts the seconds anew: it speaks three or four looks after the hang began.
_CHECK_SECONDS = 15
_HOROVODS_OWN = 60
_WORDS = b"Missing ranks:"
_REST_SECONDS = 0.5  # for the lines behind these words
_POLL_SECONDS = 0.1
_NAMED = 3  # collectives, of which a step may wait in hundreds


def check_often(hang_timeout: float) -> None:
    """Has Horovod look for stalled collectives before a watchdog ends the run; before its start.

    Args:
      hang_timeout: seconds; 0 for none. What the user has set stays.
    """
    if hang_timeout:
        os.environ.setdefault(
            CHECK_VARIABLE, str(max(1, min(_CHECK_SECONDS, int(hang_timeout / 2))))
        )


def heard() -> list[str]:
    """Listens until the inspector speaks, at most as long as it may be silent.

    Meanwhile standard error goes to a file; all of it is passed on in the end.

    Returns:
      A line for each rank that is missing, with the names of the collectives; none when nothing
      was said, as on most ranks, or while a process that is stopped holds Horovod up.
    """
    every = os.environ.get(CHECK_VARIABLE, "")
    seconds = 2 * float(every) if every.isdigit() else _HOROVODS_OWN
    deadline = time.monotonic() + min(seconds, _HOROVODS_OWN) + 1
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            while _WORDS not in _written(file.fileno()) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            time.sleep(_REST_SECONDS)
        finally:
            os.dup2(kept, 2)
            text = _written(file.fileno())
            os.write(kept, text)
            os.close(kept)
    return missing_lines(text.decode(errors="replace"))


def missing_lines(text: str) -> list[str]:
    r"""Returns what stands behind the inspector's words, a line a rank.

    >>> missing_lines("... than 60 seconds. \nMissing ranks:\n1: [data.sums]\nelse")
    ['Horovod: rank 1 is missing from data.sums.']
    """
    lines = []
    for line in text.partition(_WORDS.decode())[2].splitlines()[1:]:
        rank, colon, names = line.strip().partition(": [")
        rank = rank.rstrip("!")
        if not (colon and rank.isdigit() and names.endswith("]")):
            break
        named = names[:-1].split(", ")
        more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
        lines.append(f"Horovod: rank {rank} is missing from {', '.join(named[:_NAMED])}{more}.")
    return lines


def _written(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
