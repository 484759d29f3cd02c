"""Horovod's elastic launcher as a rank sees it: its place in the world, and news of the hosts.

The launcher's rendezvous server speaks HTTP: GET rank_and_size/HOST:SLOT says that a rank waits for
a world, and is answered when every rank of the world before waits too, or has ended
(horovod/runner/elastic/rendezvous.py). Its key-value store is emptied with each new world.
"""

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, MutableMapping
from typing import NamedTuple

from tfbig.errors import RunError, WorldChanged

_MEETING = "tfbig_meeting"  # a scope of the key-value store
_EVERYONE = "everyone"
_POLL_SECONDS = 0.2
_REQUEST_SECONDS = 30.0


class Place(NamedTuple):
    """A rank's place in a world; the fields are those of the launcher's answer, in its order."""

    rank: int  # below 0: the world is without this rank
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int

    def enter_into(self, environ: MutableMapping[str, str]) -> None:
        """Sets the variables by which Horovod, and everybody else, learns it."""
        for name, value in self._asdict().items():
            environ[f"HOROVOD_{name.upper()}"] = str(value)


class Launcher:
    """The launcher that started this process.

    Args:
      environ: in which it left its address, and this process's host and slot.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        address = environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
        self._url = f"http://{address}:{environ['HOROVOD_GLOO_RENDEZVOUS_PORT']}"
        self._slot = f"{environ['HOROVOD_HOSTNAME']}:{environ['HOROVOD_LOCAL_RANK']}"
        # The launcher is on the cluster's own network, where no proxy leads.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._has_news = False
        self._on_news: Callable[[], None] = lambda: None

    def listen(self) -> None:
        """Has the launcher tell this process of hosts that are added or taken away.

        It tells only rank 0 of a world, and says everything once: a process listens before it asks
        for its place, so that nothing is said in between.
        """
        from horovod.runner.elastic.worker import WorkerNotificationManager

        manager = WorkerNotificationManager()
        manager.register_listener(self)
        manager.init()

    def on_hosts_updated(self, timestamp: int, result: int) -> None:
        """Called by Horovod, on a thread of its own."""
        self._has_news = True
        self._on_news()

    def tell(self, on_news: Callable[[], None]) -> None:
        """Has a function called at each piece of news; at once where there was one before."""
        self._on_news = on_news
        if self._has_news:
            on_news()

    def ask_place(self, timeout: float) -> Place:
        """Returns this process's place in the next world, once that has formed.

        Args:
          timeout: seconds, in which all ranks of the last world ask too, or end.

        Raises:
          RunError: it did not form, or the launcher is gone.
        """
        try:
            answer = self._request("GET", f"rank_and_size/{self._slot}", timeout)
        except (OSError, http.client.HTTPException) as error:
            raise RunError(
                f"no new world formed for this rank ({error}): the launcher has ended, or for "
                f"{timeout:.0f} s another rank neither answered nor ended. The same command goes "
                "on from the newest checkpoint"
            ) from error
        assert answer is not None
        return Place(*map(int, answer.split(b",")[: len(Place._fields)]))

    def meet(self, rank: int, size: int, timeout: float) -> None:
        """Waits until all ranks of the world are about to start Horovod.

        A rank that dies while the others wait for it in Horovod's start has Gloo abort them all
        (a C++ exception of the background thread, measured); in this one they can turn back.

        Args:
          rank: of this process.
          size: of the world.
          timeout: seconds.

        Raises:
          WorldChanged: one didn't come.
        """
        deadline = time.monotonic() + timeout
        self._request("PUT", f"{_MEETING}/{rank}", _REQUEST_SECONDS)
        awaited = [str(other) for other in range(1, size)] if rank == 0 else [_EVERYONE]
        while awaited:
            awaited = [key for key in awaited if not self._is_there(key)]
            if awaited and time.monotonic() > deadline:
                missing = f"rank {', '.join(awaited)}" if rank == 0 else "another rank"
                raise WorldChanged(f"{missing} did not start within {timeout:.0f} s")
            if awaited:
                time.sleep(_POLL_SECONDS)
        if rank == 0:
            self._request("PUT", f"{_MEETING}/{_EVERYONE}", _REQUEST_SECONDS)

    def _is_there(self, key: str) -> bool:
        return self._request("GET", f"{_MEETING}/{key}", _REQUEST_SECONDS) is not None

    def _request(self, method: str, path: str, timeout: float) -> bytes | None:
        """Returns the answer's body; None where there is nothing of that name."""
        data = b"1" if method == "PUT" else None
        request = urllib.request.Request(f"{self._url}/{path}", data, method=method)
        try:
            with self._opener.open(request, timeout=timeout) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return None
