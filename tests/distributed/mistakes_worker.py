"""Trains as the command does, with a mistake on some ranks.

usage: mistakes_worker.py MISTAKES_JSON FLAG...

MISTAKES_JSON is {rank: [flags that this rank gets besides]}. The flag "no room" is none: that rank
finds no room for its first checkpoint.
"""

import json
import sys

from tfbig import train
from tfbig.command import launched_rank


def without_room() -> None:
    """Has the disk be full when the first checkpoint is begun."""
    from tfbig import run_state

    rooms = iter([None])  # the run's start finds room
    run_state.free_disk_error = lambda *_: next(rooms, "no room for a checkpoint: choose another")
    if launched_rank() > 0:  # rank 0 alone looks at the start
        next(rooms)


if __name__ == "__main__":
    own = json.loads(sys.argv[1]).get(str(launched_rank()), [])
    if "no room" in own:
        without_room()
        own.remove("no room")
    train.main([*sys.argv[2:], *own])
