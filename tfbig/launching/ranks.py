"""The ranks that one launcher starts: their output, their end, and why. TensorFlow-free."""

import collections
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

_LINES = 40  # of a rank's output that are kept
_OWN_END = 3.0  # seconds in which the others end by themselves when one has failed
_TERM_PATIENCE = 5.0  # seconds after SIGTERM: the others of a failed job have nothing to save
_ERROR = re.compile(r"tfbig \w+: error: .*")


class Rank:
    """One process and the end of what it printed.

    Args:
      number: the rank.
      command: its words.
      environment: its own.
      prefix: whether each line is marked with the rank.
    """

    def __init__(
        self, number: int, command: Sequence[str], environment: Mapping[str, str], prefix: bool
    ) -> None:
        self.number = number
        self._prefix = f"[{number}] ".encode() if prefix else b""
        self._lines: collections.deque[bytes] = collections.deque(maxlen=_LINES)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tfbig.launching.rank_process", str(os.getpid()), *command],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # signals reach it once, by the launcher
        )

    def read(self, lock: threading.Lock) -> threading.Thread:
        """Starts to pass its output on; after all ranks have been started."""
        thread = threading.Thread(target=self._pass_on, args=(lock,), daemon=True)
        thread.start()
        return thread

    def _pass_on(self, lock: threading.Lock) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)
            with lock:
                sys.stdout.buffer.write(self._prefix + line)
                sys.stdout.buffer.flush()

    @property
    def code(self) -> int | None:
        """Its exit code as a shell gives it; None while it runs."""
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    def reason(self) -> str:
        """Returns its error line, else the last line that it printed."""
        lines = [line.decode(errors="replace").strip() for line in self._lines]
        errors = [match[0] for line in lines if (match := _ERROR.search(line))]
        # What all ranks meet only rank 0 prints, perhaps on another host.
        nothing = "it printed nothing" + "; rank 0 may have said why" * (self.number > 0)
        return (errors or [line for line in lines if line] or [nothing])[-1]

    def signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.process.poll() is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """Ends it and what it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)


class Ranks:
    """The ranks of one launcher.

    Args:
      commands: by rank, words and environment.
    """

    def __init__(self, commands: Mapping[int, tuple[Sequence[str], Mapping[str, str]]]) -> None:
        self._ranks: list[Rank] = []
        self._stopping = False
        prefix = next(iter(commands.values()))[1].get("HOROVOD_SIZE") != "1"
        try:
            for number, (command, environment) in commands.items():
                self._ranks.append(Rank(number, command, environment, prefix))
        except BaseException:
            self._kill()
            raise
        lock = threading.Lock()
        self._readers = [rank.read(lock) for rank in self._ranks]

    def signal(self, number: int) -> None:
        """Passes a signal on: they save and leave, in their own time."""
        self._stopping = True
        for rank in self._ranks:
            rank.signal(number)

    def wait(self) -> tuple[int, str]:
        """Returns the exit code and, unless it is 0, whose it is and why.

        The first rank that fails decides; the others are ended.
        """
        try:
            failed = None
            while failed is None and any(rank.code is None for rank in self._ranks):
                failed = next((rank for rank in self._ranks if rank.code), None)
                time.sleep(0.1)
            failed = failed or next((rank for rank in self._ranks if rank.code), None)
            if failed is None:
                return 0, ""
            # Ranks that were told to stop save first, whichever is done before.
            if not self._stopping:
                self._end_all()
            while self._stopping and any(rank.code is None for rank in self._ranks):
                time.sleep(0.1)
            self._join()
            code = failed.code or 0
            return code, f"rank {failed.number} ended with code {code}: {failed.reason()}"
        finally:
            self._kill()
            self._join()

    def _end_all(self) -> None:
        for number, patience in ((0, _OWN_END), (signal.SIGTERM, _TERM_PATIENCE)):
            if number:
                for rank in self._ranks:
                    rank.signal(number)
            deadline = time.monotonic() + patience
            while any(rank.code is None for rank in self._ranks):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.1)
        self._kill()

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.process.wait()

    def _join(self) -> None:
        for thread in self._readers:
            thread.join(timeout=2.0)  # a grandchild may hold the pipe
