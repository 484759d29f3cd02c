"""Work shared by processes that never talk: items, claims, and results committed by rename.

Every process that works on a data folder goes through the same items in its own order. An item is
done when its result file exists; results are a function of the plan alone, so an item done twice,
by a process that was thought dead and wasn't, is done alike. A claim only saves double work.
"""

import contextlib
import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tfbig.durable_file import unlink_quietly, write_atomic

FOLDER = "work"  # of the data folder; removed at the end
_HEARTBEAT = 2.0  # seconds between signs of life
_DEAD_AFTER = 120.0  # seconds without one after which another process may take an item over
_POLL = 0.05, 2.0  # seconds between looks at what others do, at first and at most

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PROCESS_IDS = "/proc/self/ns/pid"  # names the space of process ids that a container has of its own

Result = dict[str, Any]
Item = TypeVar("Item", bound=str)


class WorkFolder:
    """Claims and results of one data folder.

    Args:
      folder: of the data; exists.

    Attributes:
      progress: units of the item at hand that are done; whoever works on it sets it.
    """

    def __init__(self, folder: Path) -> None:
        self.root = folder / FOLDER
        self._results, self._claims = self.root / "results", self.root / "claims"
        for path in (self._results, self._claims):
            path.mkdir(parents=True, exist_ok=True)
        self._place = _place()
        self._owner = f"{self._place} {os.getpid()} {_start_of(os.getpid())}"
        self._claimed: Path | None = None
        self.progress = 0

    def temporary(self, name: str) -> Path:
        """Returns a path in the work folder that no other process uses."""
        return self.root / f"{name}.tmp-{self._place.replace('/', '_')}-{os.getpid()}"

    def is_done(self, item: str) -> bool:
        """Returns whether an item's result is there."""
        return (self._results / f"{item}.json").exists()

    def result(self, item: str) -> Result:
        """Returns the result of an item that is done."""
        return json.loads((self._results / f"{item}.json").read_bytes())

    def results(self, items: Sequence[str]) -> list[Result]:
        """Returns the results of items that are done, in their order."""
        return [self.result(item) for item in items]

    def done_items(self) -> set[str]:
        """Returns the names of all items that are done."""
        return {path.stem for path in self._results.glob("*.json")}

    def in_flight(self) -> dict[str, int]:
        """Returns {item: units done} of what processes that are alive have claimed."""
        found = {}
        for path in self._claims.iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):
                if self._is_alive(path):
                    found[path.name] = int(path.read_text().split()[3])
        return found

    def run(self, items: Sequence[str], perform: Callable[[str], Result]) -> list[Result]:
        """Returns the results of all items, doing those that no other process does.

        Args:
          items: names; any process may ask for the same.
          perform: does one: its files are under their final names when it returns.
        """
        order = list(items)
        random.Random(f"{self._owner} {order[:1]}").shuffle(order)  # processes meet less often
        waited = _POLL[0]
        while True:
            done = self.done_items()
            order = [item for item in order if item not in done]
            if not order:
                return self.results(items)
            worked = False
            for item in order:
                if not self.is_done(item) and self._claim(item):
                    if self.is_done(item):  # between the look and the claim
                        unlink_quietly(self._claims / item)
                        continue
                    with self._alive(item):
                        write_atomic(
                            self._results / f"{item}.json",
                            json.dumps(perform(item), ensure_ascii=False).encode(),
                        )
                    worked = True
            waited = _POLL[0] if worked else min(2 * waited, _POLL[1])
            if not worked:
                time.sleep(waited)

    def _claim(self, item: str) -> bool:
        path = self._claims / item
        if path.exists() and not self._is_alive(path):
            unlink_quietly(path)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return False
        os.write(descriptor, f"{self._owner} 0".encode())
        os.close(descriptor)
        return True

    def _is_alive(self, claim: Path) -> bool:
        """Returns whether the process that holds a claim seems to live.

        A process of this machine is asked for, one of another is judged by its signs of life. So is
        one of another container or of the time before a restart, whatever their host's name is: a
        process id says nothing there. Where a process's start is known, one that has its id and
        began at another time is another one.
        """
        try:
            age = time.time() - claim.stat().st_mtime
        except OSError:
            return False
        shows_life = age < _DEAD_AFTER
        try:
            place, process, start, *_ = claim.read_text().split()
            number = int(process)
        except (OSError, ValueError):  # gone, or being written
            return shows_life and claim.exists()
        if place != self._place:
            return shows_life
        found = _start_of(number)
        if found != "?":
            return found == start
        try:
            os.kill(number, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return shows_life

    @contextlib.contextmanager
    def _alive(self, item: str) -> Any:
        """Holds a claim: shows signs of life in the background, and gives it back."""
        path, ended = self._claims / item, threading.Event()
        self.progress = 0

        def show() -> None:
            while not ended.wait(_HEARTBEAT):
                with contextlib.suppress(OSError):
                    path.write_text(f"{self._owner} {int(self.progress)}")

        thread = threading.Thread(target=show, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            unlink_quietly(path)


def _place() -> str:
    """Returns in what a process id names one process: a host, since its start, and a container."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(_BOOT_ID.read_text().strip()[:8])
    with contextlib.suppress(OSError):
        parts.append(os.readlink(_PROCESS_IDS).strip("pid:[]"))
    return "/".join(parts)


def _start_of(process: int) -> str:
    """Returns when a process of this place began, in the kernel's ticks.

    "none" is one that has ended, though its parent may not have asked yet; "?" where the system
    does not say.
    """
    try:
        # Its name, in brackets, may hold anything; behind it stand its state and 19 more fields.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return "none" if fields[0] in ("Z", "X") else fields[19]
    except (FileNotFoundError, ProcessLookupError):
        return "none" if _BOOT_ID.exists() else "?"
    except (OSError, IndexError):
        return "?"


def commit_folder(temporary: Path, final: Path) -> None:
    """Renames a finished folder into place; one that another process put there stays."""
    import shutil

    try:
        os.rename(temporary, final)
    except OSError:
        if not final.is_dir():
            raise
        shutil.rmtree(temporary)
