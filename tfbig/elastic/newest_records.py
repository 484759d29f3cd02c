"""The newest steps' records, on every rank: rank 0 may be lost before it has written them."""

from typing import Any

from tfbig.loop import Hook

_NUM_RECORDS = 16


class NewestRecords(Hook):
    """Keeps records for the next world.

    Attributes:
      newest: of the last steps.
      has_any: whether a step was made in this world.
    """

    def __init__(self) -> None:
        self.newest: list[dict[str, Any]] = []
        self.has_any = False

    def on_step(self, record: dict[str, Any]) -> None:
        self.newest = [*self.newest[1 - _NUM_RECORDS :], record]
        self.has_any = True
