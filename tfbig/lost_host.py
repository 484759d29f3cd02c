"""Which host has gone, when the ranks' connection breaks: the error of the engine names none."""

import contextlib
import re
import socket
import threading
from collections.abc import Iterator, Mapping

from tfbig.errors import RunError

# The name of an operation of the engine's, or the source that failed or made one of another name.
_ENGINE = re.compile(r"Horovod|horovod/tensorflow/|/gloo/")
_PATIENCE = 5.0  # seconds for a host to answer
_PORT = 22  # open or closed, a host that is there answers at once


def is_engine_error(error: BaseException) -> bool:
    """Returns whether an operation of Horovod's failed, whatever Gloo says of the connection.

    >>> is_engine_error(RuntimeError("[/x/gloo/transport/tcp/pair.cc:1] Connection closed by peer"))
    True
    """
    return _ENGINE.search(str(error)) is not None


def answers(host: str, patience: float = _PATIENCE) -> bool:
    """Returns whether a host is there; one whose name does not resolve is taken to be."""
    try:
        with socket.create_connection((host, _PORT), patience):
            return True
    except (ConnectionRefusedError, ConnectionResetError, socket.gaierror):
        return True
    except OSError:  # no route, no answer
        return False


def silent_hosts(hosts: Mapping[int, str], own: str) -> dict[str, list[int]]:
    """Returns the hosts that do not answer, with their ranks; all are asked at once.

    Args:
      hosts: by rank.
      own: this host.
    """
    ranks: dict[str, list[int]] = {}
    for rank, host in sorted(hosts.items()):
        if host != own:
            ranks.setdefault(host, []).append(rank)
    silent: list[str] = []

    def ask(host: str) -> None:
        if not answers(host):
            silent.append(host)

    threads = [threading.Thread(target=ask, args=(host,), daemon=True) for host in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _PATIENCE)
    return {host: ranks[host] for host in ranks if host in silent}


@contextlib.contextmanager
def lost_hosts_named(hosts: Mapping[int, str]) -> Iterator[None]:
    """Names the hosts that are gone when the ranks' connection breaks inside.

    Args:
      hosts: by rank, of all that are known by then: a watchdog's.

    Raises:
      RunError: instead of the engine's error, where a host does not answer.
    """
    try:
        yield
    except Exception as error:
        if not is_engine_error(error):
            raise
        lost = silent_hosts(dict(hosts), socket.gethostname())
        if not lost:
            raise
        shown = ", ".join(
            f"{host} (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})"
            for host, ranks in lost.items()
        )
        raise RunError(
            f"host {shown} no longer answers: it is down or cut off. The same command goes on from "
            "the newest checkpoint, without it or when it is back"
        ) from error
