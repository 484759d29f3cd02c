"""What every start checks, whatever the strategy: the ranks found each other, each has its GPUs."""

import sys

from tfbig.shared_memory import shared_memory_warning
from trainers.base import Trainer
from trainers.devices import driven_gpus
from trainers.gpu_identity import check_own_gpus, gpu_uuid
from trainers.world_size import check_world_size


def check_start(trainer: Trainer, advice: str) -> None:
    """Checks that a trainer's ranks are those that a launcher started; all ranks call it.

    Args:
      trainer: as its constructor has left it.
      advice: what to do where it is one of several that know nothing of each other.

    Raises:
      SharedError: on every rank, when they are too few or two drive one GPU.
    """
    check_world_size(trainer.size, advice)
    gpus = driven_gpus()
    check_own_gpus(trainer, [gpu_uuid(number) for number in gpus])
    warning = shared_memory_warning(len(gpus) * trainer.local_size)
    if warning and trainer.local_rank == 0:
        print(f"tfbig: {warning}", file=sys.stderr, flush=True)
