"""Signals that end a run after its next step, turned into a number all ranks can agree on."""

import signal
from types import FrameType
from typing import Any

STOP = 2  # what train_step's `signal` carries; the largest over ranks wins


class StopSignal:
    """Notes SIGTERM, SIGUSR1 and SIGINT while it is entered; handlers are put back after.

    Attributes:
      value: 0, or STOP once a signal has come.
      name: of the signal.
    """

    HANDLED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self) -> None:
        self.value, self.name = 0, ""
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        for number in self.HANDLED:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.value, self.name = STOP, signal.Signals(number).name
