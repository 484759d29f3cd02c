"""Cards, names and reachability."""

import socket

import pytest

from tfbig.diagnosis.network import Card, examine, parse_hosts, reach, read_cards
from tfbig.errors import UserError

LOOPBACK, FAST, SLOW = (
    Card("lo", "127.0.0.1", 0),
    Card("ib0", "10.0.0.1", 100_000),
    Card("eth0", "192.0.2.1", 1000),
)


@pytest.fixture(autouse=True)
def resolves(monkeypatch):
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.1")


def problems(found):
    return [f.text for f in found.findings if f.level != "fine"]


def test_cards_are_listed_and_virtual_ones_left_out():
    found = examine([LOOPBACK, FAST, Card("docker0", "172.17.0.1", 0)], 2, {})
    assert found.findings[0].text == "cards: ib0 10.0.0.1 100 Gb/s"
    assert not problems(found)


def test_this_host_has_its_loopback():
    assert "lo" in {card.name for card in read_cards()}


def test_several_cards_need_a_choice():
    assert "2 cards" in problems(examine([FAST, SLOW], 2, {}))[0]
    assert not problems(examine([FAST, SLOW], 1, {}))
    assert not problems(examine([FAST, SLOW], 2, {"HOROVOD_GLOO_IFACE": "ib0"}))


@pytest.mark.parametrize(
    ("name", "value", "is_there"),
    [
        ("HOROVOD_GLOO_IFACE", "eth1", False),
        ("NCCL_SOCKET_IFNAME", "eth1", False),
        ("NCCL_SOCKET_IFNAME", "eth", True),
        ("NCCL_SOCKET_IFNAME", "=eth", False),
        ("NCCL_SOCKET_IFNAME", "=eth0,ib0", True),
        ("NCCL_SOCKET_IFNAME", "^docker0", True),
    ],
)
def test_chosen_cards_exist(name, value, is_there):
    found = problems(examine([SLOW], 1, {name: value}))
    assert found == ([] if is_there else found) and bool(found) is not is_there
    assert all(f"{name}={value}" in text for text in found)


def test_own_name(monkeypatch):
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    assert "which no other host reaches" in problems(examine([SLOW], 2, {}))[0]
    assert not problems(examine([SLOW], 1, {}))

    def unknown(name):
        raise socket.gaierror

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    (found,) = [f for f in examine([SLOW], 2, {}).findings if f.level == "problem"]
    assert "does not resolve" in found.text


def test_hosts_are_reached_or_named():
    with socket.create_server(("127.0.0.1", 0)) as open_one:
        port = open_one.getsockname()[1]
        with socket.create_server(("127.0.0.1", 0)) as closed_one:
            closed = closed_one.getsockname()[1]
        found = reach([("127.0.0.1", port), ("127.0.0.1", closed)])
    assert [f.level for f in found.findings] == ["problem", "fine"]
    assert f"port {closed}: Connection refused" in found.findings[0].text


def test_host_lists():
    assert parse_hosts("a, b.c:2222") == [("a", 22), ("b.c", 2222)] and parse_hosts("") == []
    for text in ("a:b", "a:70000", "a b"):
        with pytest.raises(UserError, match="--hosts="):
            parse_hosts(text)
