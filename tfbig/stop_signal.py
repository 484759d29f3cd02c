"""Signals that end a run after its next step, turned into a number all ranks can agree on."""

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

from tfbig.command import EXIT_SIGNAL

# What train_step's `signal` carries; the largest over ranks wins.
RESHAPE = 1  # ranks are to come or go (elastic runs): leave the world after this step
STOP = 2  # save and end
AT_ONCE_AFTER = 10.0  # seconds after the first signal from which on another one ends the process


class StopSignal:
    """Notes SIGTERM, SIGUSR1 and SIGINT while it is entered; handlers are put back after.

    A second signal within AT_ONCE_AFTER changes nothing: launchers and schedulers send several.
    A later one ends the process at once, without a save, with exit code 143.

    Python runs a handler only between two steps of the main thread, which may wait in a collective
    for ever. So the signals are read by a thread, from a pipe that the C handler writes to.

    Attributes:
      value: 0, RESHAPE once ranks are to come or go, or STOP once a signal has come.
      name: of the first signal.
    """

    HANDLED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self) -> None:
        self.value, self.name = 0, ""
        self._first = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._previous_wakeup = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._thread = threading.Thread(
            target=self._listen, args=(reading,), name="signals", daemon=True
        )
        self._thread.start()
        for number in self.HANDLED:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        os.close(self._writing)  # which ends the thread
        self._thread.join()

    def request(self, reason: str) -> None:
        """Ends the run as a signal would, for a reason in words."""
        self.value, self.name = STOP, reason

    def ask_reshape(self) -> None:
        """Has the ranks leave their world after the next step; a signal to stop wins."""
        self.value = max(self.value, RESHAPE)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.value, self.name = STOP, self.name or signal.Signals(number).name

    def _listen(self, reading: int) -> None:
        while number := os.read(reading, 1):
            if number[0] not in self.HANDLED:
                continue
            now = time.monotonic()
            self._first = self._first or now
            self._note(number[0], None)
            if now - self._first > AT_ONCE_AFTER:
                print("a second signal: this process ends without a save", file=sys.stderr)
                sys.stderr.flush()
                os._exit(EXIT_SIGNAL)
        os.close(reading)
