"""Where all launchers of a job meet, before the ranks start and while they do.

Launcher 0 runs Horovod's own rendezvous server. Each launcher writes its host and number of ranks
there; when all have, launcher 0 publishes the list, and the ranks that each one starts find each
other at the same server. It believes whoever reaches its port, as horovodrun's does: keep it inside
the cluster's network. TensorFlow-free.
"""

import json
import logging
import socket
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import psutil

from tfbig.errors import RunError, UserError
from tfbig.launching.place import Place, Slot, slots_of

_POLL = 0.5  # seconds between two questions
_PATIENCE = 5.0  # seconds for one
_LAST_READ = 30.0  # seconds in which the others must have read the list
_CAME, _WORLD, _READ = "launchers", "world", "read"  # scopes of the server's keys


class Stopped(Exception):
    """A signal came while launchers were waiting for each other."""


class Meeting:
    """The meeting of one attempt to run the job.

    After a restart a launcher may still reach launcher 0's old server, which goes on until the
    ranks there have ended: each one shows a new token, and takes no list for its own without it.

    Args:
      place: of this launcher.
      timeout: seconds in which all must have come.
      is_stopped: asked while waiting.
    """

    def __init__(self, place: Place, timeout: float, is_stopped: Callable[[], bool]) -> None:
        self._place = place
        self._timeout, self._is_stopped = timeout, is_stopped
        self._deadline = time.monotonic() + timeout
        self._server: Any = None
        self.address = ""

    def __enter__(self) -> "Meeting":
        if self._place.number == 0:
            self._serve()
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._let_all_read()
            self._server.shutdown()
            self._server.server_close()

    def _serve(self) -> None:
        # Imported here: it takes a while, and launchers other than the first need none of it.
        from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

        logging.getLogger("http.server").setLevel(logging.ERROR)
        try:
            self._server = RendezvousHTTPServer(("", self._place.port), RendezvousHandler, 0)
        except OSError as error:
            raise UserError(
                f"port {self._place.port} of this host cannot be opened ({error.strerror}): give "
                "another one by --port, the same on all hosts."
            ) from None
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def meet(self) -> tuple[list[Slot], list[dict[str, Any]]]:
        """Returns all ranks, and what each launcher said of itself; all launchers call it.

        Raises:
          RunError: some did not come in time.
          UserError: what they said doesn't fit together.
          Stopped: a signal came.
        """
        self.address = self._resolve()
        own = {
            "host": socket.gethostname(),
            "token": uuid.uuid4().hex,
            "count": self._place.num_processes,
            "address": local_address(self.address),
        }
        if self._place.number == 0:
            everyone = self._collect(own)
        else:
            everyone = self._report(own)
        slots = slots_of([one["host"] for one in everyone], [one["count"] for one in everyone])
        return slots, everyone

    def _resolve(self) -> str:
        """Returns launcher 0's address; a name may come late into a cluster's DNS."""
        if self._place.num_launchers == 1:
            return "127.0.0.1"
        while True:
            try:
                return socket.gethostbyname(self._place.first_host)
            except OSError:
                self._wait(f"{self._place.first_host} does not resolve")

    def _collect(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """Waits, as launcher 0, until all have said what they are, and publishes it."""
        said = {0: own}
        while len(said) < self._place.num_launchers:
            said |= {int(index): json.loads(value) for index, value in self._scope(_CAME).items()}
            if len(said) < self._place.num_launchers:
                absent = sorted(set(range(self._place.num_launchers)) - set(said))
                self._wait(f"{self._named(absent)} have not come", len(absent))
        everyone = [said[index] for index in range(self._place.num_launchers)]
        own["address"] = first_address(everyone)
        try:
            slots = slots_of([one["host"] for one in everyone], [one["count"] for one in everyone])
        except UserError:
            pass  # the others find the same in the list
        else:
            self._server.init([_horovods(slot) for slot in slots])
        with self._server.cache_lock:
            self._server.cache.setdefault(_WORLD, {})["launchers"] = json.dumps(everyone).encode()
        return everyone

    def _named(self, launchers: Sequence[int]) -> str:
        """Returns who some launchers are, by host where that is known."""
        hosts = self._place.hosts
        names = list(dict.fromkeys(hosts[i] if hosts else str(i) for i in launchers))
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        return f"the launchers of {'' if hosts else 'index '}{', '.join(names[:8])}{more}"

    def _scope(self, name: str) -> dict[str, bytes]:
        with self._server.cache_lock:
            return dict(self._server.cache.get(name, {}))

    def _let_all_read(self) -> None:
        """Waits, as launcher 0, until the others have read the list that was published."""
        deadline = time.monotonic() + _LAST_READ
        while self._scope(_WORLD) and len(self._scope(_READ)) < self._place.num_launchers - 1:
            if time.monotonic() > deadline:
                return
            time.sleep(0.1)

    def _report(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """Says what this launcher is until launcher 0 has published what all are."""
        base = f"http://{self.address}:{self._place.port}"
        mine, data = f"{self._place.number}", json.dumps(own).encode()
        while True:
            try:
                _put(f"{base}/{_CAME}/{mine}", data)
                everyone = json.loads(_get(f"{base}/{_WORLD}/launchers") or "[]")
                if own in everyone:
                    _put(f"{base}/{_READ}/{mine}", b"1")
                    return everyone
                problem = f"{self._place.first_host} waits for other hosts"
            except OSError as error:
                reason = getattr(error, "reason", error)
                problem = (
                    f"{self._place.first_host} does not answer on port {self._place.port}: {reason}"
                )
            self._wait(problem)

    def _wait(self, problem: str, count: int = 0) -> None:
        if self._is_stopped():
            raise Stopped
        if time.monotonic() > self._deadline:
            more = f" ({count} of {self._place.num_launchers})" if count else ""
            raise RunError(
                f"{problem}{more} within --start_timeout={self._timeout:g} s: look at those hosts "
                "and at the network between them (tfbig doctor --hosts=...)"
            )
        time.sleep(_POLL)


def _put(url: str, data: bytes) -> None:
    _ask(urllib.request.Request(url, data, method="PUT"))


def _get(url: str) -> bytes:
    return _ask(urllib.request.Request(url))


def _ask(request: urllib.request.Request) -> bytes:
    """Returns the answer's body, b"" where the key is not there yet."""
    # Never through a proxy that the environment names: the address is the cluster's own.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_PATIENCE) as answer:
            return answer.read()
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return b""
        raise


def _horovods(slot: Slot) -> Any:
    from horovod.runner.common.util.hosts import SlotInfo

    return SlotInfo(
        hostname=slot.host,
        rank=slot.rank,
        local_rank=slot.local_rank,
        cross_rank=slot.cross_rank,
        size=slot.size,
        local_size=slot.local_size,
        cross_size=slot.cross_size,
    )


def local_address(remote: str) -> str:
    """Returns this host's address on the way to another one; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((remote, 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def first_address(everyone: Sequence[dict[str, Any]]) -> str:
    """Returns launcher 0's address as the other hosts reach it.

    Its host's own name, which the others reach it by, may be 127.0.1.1 to itself: Debian's default.

    Args:
      everyone: what the launchers said.
    """
    first = everyone[0]
    others = [one["address"] for one in everyone if one["host"] != first["host"]]
    return local_address(others[0]) if others else str(first["address"])


def choose_card(index: int, everyone: Sequence[dict[str, Any]], chosen: str) -> str:
    """Returns the network card that leads to the other hosts, "lo" where there is no other.

    Args:
      index: of this launcher.
      everyone: what the launchers said.
      chosen: the user's choice.

    Raises:
      UserError: this host has no such card.
    """
    cards = psutil.net_if_addrs()
    if chosen:
        if chosen not in cards:
            raise UserError(
                f"--network_interface={chosen} is no card of {socket.gethostname()}: choose one "
                f"of {', '.join(sorted(cards))}."
            )
        return chosen
    here = everyone[index]["host"]
    others = [one["address"] for one in everyone if one["host"] != here]
    if not others:
        return "lo"
    own = local_address(others[0])
    return next(name for name, addresses in cards.items() if own in {a.address for a in addresses})
