"""Trains as the command does, with a mistake on some ranks.

usage: mistakes_worker.py MISTAKES_JSON FLAG...

MISTAKES_JSON is {rank: [flags that this rank gets besides]}. Two flags are none: with "no room"
that rank finds no room for its first checkpoint; with "GPU 7" it drives two GPUs, one of which is
called 7.
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


def with_gpus(name: str) -> None:
    """Has this rank drive two GPUs, as far as its start sees: one of its own, and a named one."""
    from trainers import start_check

    uuids = [b"own %d" % launched_rank(), name.encode()]
    start_check.driven_gpus = lambda: list(range(len(uuids)))
    start_check.gpu_uuid = uuids.__getitem__


if __name__ == "__main__":
    own = json.loads(sys.argv[1]).get(str(launched_rank()), [])
    if "no room" in own:
        without_room()
        own.remove("no room")
    for word in [word for word in own if word.startswith("GPU ")]:
        with_gpus(word)
        own.remove(word)
    train.main([*sys.argv[2:], *own])
