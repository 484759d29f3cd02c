"""Ends a run whose replicas hold different weights."""

from typing import Any

from tfbig.errors import RunError
from tfbig.loop import Hook, Progress


class ReplicaHook(Hook):
    """Has replicated weights compared every so many steps, on every rank at the same ones.

    Args:
      trainer: whose `differing_replicas` is asked.
      every: steps.
    """

    def __init__(self, trainer: Any, every: int) -> None:
        self._trainer, self._every, self._last_equal = trainer, every, 0

    def on_start(self, progress: Progress, resumed: bool) -> None:
        self._last_equal = progress.step

    def on_step(self, record: dict[str, Any]) -> None:
        """Compares when it is due.

        Raises:
          RunError: on every rank, with the ranks and variables.
        """
        step = record["step"]
        if step % self._every:
            return
        found = self._trainer.differing_replicas()
        if not found:
            self._last_equal = step
            return
        path, ranks = found[0]
        more = f" and {len(found) - 1} more variables" if len(found) > 1 else ""
        holder = self._trainer.holder
        which = f"{holder} {ranks[0]} differs" if len(ranks) == 1 else f"{holder}s {ranks} differ"
        raise RunError(
            f"step {step}: {which} in {path}{more}, which must be the same bits on all {holder}s"
            f" that hold it; at step {self._last_equal} it was. Look at that host's memory and"
            f" driver; go on from a checkpoint of step {self._last_equal} or before: later ones may"
            " hold it (tfbig checkpoints list).",
            on_all_ranks=True,
        )
