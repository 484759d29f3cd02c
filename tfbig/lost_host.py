"""Which host has gone, when the ranks' connection breaks: the error of the engine names none."""

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from tfbig.errors import RunError
from tfbig.heartbeat import Heartbeats
from tfbig.run_folder import RunFolder

_ENGINE = "Horovod"  # in every error of its operations, whatever Gloo says of the connection
_PATIENCE = 5.0  # seconds for a host to answer
_PORT = 22  # open or closed, a host that is there answers at once


def answers(host: str, patience: float = _PATIENCE) -> bool:
    """Returns whether a host is there; one whose name does not resolve is taken to be."""
    try:
        with socket.create_connection((host, _PORT), patience):
            return True
    except (ConnectionRefusedError, ConnectionResetError, socket.gaierror):
        return True
    except OSError:  # no route, no answer
        return False


def silent_hosts(heartbeats: Mapping[int, Mapping[str, Any]], own: str) -> dict[str, list[int]]:
    """Returns the hosts that do not answer, with their ranks; all are asked at once.

    Args:
      heartbeats: of all ranks, as `Heartbeats.read` gives them.
      own: this host.
    """
    ranks: dict[str, list[int]] = {}
    for rank, record in sorted(heartbeats.items()):
        if record.get("host", own) != own:
            ranks.setdefault(record["host"], []).append(rank)
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
def lost_hosts_named(folder: RunFolder, rank: int, size: int) -> Iterator[None]:
    """Names the hosts that are gone when the ranks' connection breaks inside.

    Args:
      folder: the run's, with the ranks' heartbeats.
      rank: this process.
      size: number of ranks.

    Raises:
      RunError: instead of the engine's error, where a host does not answer.
    """
    try:
        yield
    except Exception as error:
        if size == 1 or _ENGINE not in str(error):
            raise
        lost = silent_hosts(
            Heartbeats(folder.heartbeats_dir, rank, size).read(), socket.gethostname()
        )
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
