"""Network cards, the host's own name, and other hosts by TCP. TensorFlow-free."""

import os
import re
import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import psutil

from tfbig.diagnosis.finding import Examined, Level
from tfbig.errors import UserError

_VIRTUAL = re.compile(r"lo|docker\d*|br-.*|veth.*|virbr.*|cni.*|flannel.*|cali.*|tun.*|tap.*")
_PATIENCE = 3.0  # seconds for one connection
# What chooses the card: Gloo takes one name, NCCL prefixes, ^ leaves out, = takes exact ones.
_GLOO, _NCCL = "HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME"


class Card(NamedTuple):
    """A network card that is up and has an IPv4 address."""

    name: str
    address: str
    megabits: int  # per second; 0 where the driver doesn't say


def read_cards() -> list[Card]:
    """Returns the cards of this host that are up."""
    states = psutil.net_if_stats()
    return [
        Card(name, address.address, states[name].speed)
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET and name in states and states[name].isup
    ]


def parse_hosts(text: str) -> list[tuple[str, int]]:
    """Returns hosts and ports of a comma-separated list.

    Raises:
      UserError: an entry is none.

    >>> parse_hosts("a,b:2222")
    [('a', 22), ('b', 2222)]
    """
    hosts = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"([\w.-]+)(?::(\d{1,5}))?", part.strip())
        if match is None or not 0 < int(match[2] or 22) < 65536:
            raise UserError(f"--hosts={text}: {part!r} is no host: give e.g. --hosts=a,b:2222.")
        hosts.append((match[1], int(match[2] or 22)))
    return hosts


def examine(
    cards: Sequence[Card],
    num_hosts: int = 1,
    environ: Mapping[str, str] = os.environ,
) -> Examined:
    """Returns what is wrong with this host's cards and name.

    Args:
      cards: of `read_cards`.
      num_hosts: of the run.
      environ: the variables that choose a card are looked at.
    """
    found = Examined()
    real = [card for card in cards if not _VIRTUAL.fullmatch(card.name)]
    shown = ", ".join(
        f"{card.name} {card.address}" + (f" {card.megabits / 1000:g} Gb/s" if card.megabits else "")
        for card in real
    )
    found.add("network", "fine", f"cards: {shown or 'none but virtual ones'}")
    names = {card.name for card in cards}
    chosen = environ.get(_GLOO, "")
    if chosen and chosen not in names:
        found.add(
            "network",
            "problem",
            f"{_GLOO}={chosen}, but no card of that name is up here",
            f"set it to one of {', '.join(sorted(names))}",
        )
    for text in _missing_for_nccl(environ.get(_NCCL, ""), names):
        advice = f"set it to one of {', '.join(sorted(names))}"
        found.add("network", "problem", text, advice)
    if num_hosts > 1 and len(real) > 1 and not chosen:
        found.add(
            "network",
            "warning",
            f"{len(real)} cards, and nothing says which one to use",
            f"pass --network_interface to tfbig launch (or set {_GLOO} and {_NCCL})",
        )
    _look_at_name(num_hosts, found)
    return found


def _missing_for_nccl(value: str, names: set[str]) -> list[str]:
    """Returns a line where NCCL's choice of cards leaves it none (docs.nvidia.com, NCCL)."""
    if not value or value.startswith("^"):
        return []
    exact = value.startswith("=")
    words = [word for word in value.removeprefix("=").split(",") if word]
    fits = any(name == w if exact else name.startswith(w) for w in words for name in names)
    return [] if fits else [f"{_NCCL}={value}, but no such card is up here"]


def _look_at_name(num_hosts: int, found: Examined) -> None:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        level: Level = "problem" if num_hosts > 1 else "warning"
        text = f"this host's own name, {name}, does not resolve"
        found.add("network", level, text, "put it into DNS or /etc/hosts")
        return
    if address.startswith("127.") and num_hosts > 1:
        text = f"this host's own name, {name}, resolves to {address}, which no other host reaches"
        found.add("network", "warning", text, "give it the address of its network card")


def reach(hosts: Sequence[tuple[str, int]], patience: float = _PATIENCE) -> Examined:
    """Returns which hosts answer; each is tried once.

    Args:
      hosts: names and ports.
      patience: seconds for each.
    """
    found, answered = Examined(), []
    for host, port in hosts:
        try:
            with socket.create_connection((host, port), patience):
                answered.append(host)
        except socket.gaierror:
            text = f"{host} does not resolve"
            found.add("network", "problem", text, "put it into DNS or /etc/hosts")
        except OSError as error:
            reason = error.strerror or str(error)
            found.add(
                "network",
                "problem",
                f"{host} does not answer on port {port}: {reason}",
                "start its sshd, open the port between the hosts, or look at its network",
            )
    if answered:
        found.add("network", "fine", f"reached: {', '.join(answered)}")
    return found
