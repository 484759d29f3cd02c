"""A save under way in a thread of its own."""

import threading
import time
from collections.abc import Callable
from typing import NamedTuple


class Saved(NamedTuple):
    """A checkpoint that is complete."""

    step: int
    seconds: float  # from the copy's beginning until it had been written and read back


class Saving:
    """Writes one checkpoint beside the training thread.

    Args:
        step: of the checkpoint.
        write: writes it; it calls neither TensorFlow nor a collective.
        start: time.perf_counter() when the save began.
    """

    def __init__(self, step: int, write: Callable[[], None], start: float) -> None:
        self._step, self._write, self._start = step, write, start
        self._error: BaseException | None = None
        self._seconds = 0.0
        # A daemon: a run that fails doesn't wait for a rank whose part never comes.
        self._thread = threading.Thread(target=self._run, name=f"checkpoint {step}", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether `result` returns at once."""
        return not self._thread.is_alive()

    def result(self) -> Saved:
        """Waits for the end.

        Raises:
            CheckpointError: it could not be written; the error is the thread's own.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        return Saved(self._step, self._seconds)

    def wait_at_most(self, seconds: float) -> None:
        """Gives a run that fails the chance to complete what it was writing."""
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:  # handed to the training thread
            self._error = error
        self._seconds = time.perf_counter() - self._start
