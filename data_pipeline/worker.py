"""One more process for a data folder that is being prepared: `python -m data_pipeline.worker`."""

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from data_pipeline.building import building
from data_pipeline.plan import Plan
from data_pipeline.preparation import num_cores
from data_pipeline.stages import Stages
from tfbig.command import EXIT_USER_ERROR
from tfbig.errors import UserError


def run(folder: Path, num_workers: int) -> None:
    """Works on a folder until it is complete.

    Args:
      folder: of the data, with its plan.
      num_workers: processes on this machine.
    """
    plan = Plan.read(folder)
    with building(folder, plan.to_bytes()):
        Stages(plan, folder, max(1, num_cores() // num_workers), say=None).run()


def _end_with_parent() -> None:
    """Ends this process when the one that started it is gone: its pipe closes then."""
    sys.stdin.buffer.read()
    os._exit(1)


def main(arguments: Sequence[str]) -> None:
    """Runs the worker; the process that started it says what is wrong."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        run(Path(arguments[0]), int(arguments[1]))
    except UserError:
        raise SystemExit(EXIT_USER_ERROR) from None


if __name__ == "__main__":
    main(sys.argv[1:])
