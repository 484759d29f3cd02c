"""The card that leads to the other hosts, among several that a network namespace really has."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.distributed.launch import REPOSITORY, environment

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not os.environ.get("TFBIG_SYSTEM_TESTS"), reason="make test-system runs it"),
]
# Two cards, a bridge as Docker makes it, and a route by which a third network is reached.
CARDS = """
ip link set lo up
ip link add fast0 type veth peer name fast1
ip link add slow0 type veth peer name slow1
ip link add docker0 type bridge
ip addr add 10.98.1.1/24 dev fast0
ip addr add 10.98.2.1/24 dev slow0
ip addr add 172.17.0.1/16 dev docker0
for card in fast0 fast1 slow0 slow1 docker0; do ip link set $card up; done
ip route add 10.98.3.0/24 via 10.98.2.9
"""
HERE = {"host": "here", "address": "10.98.1.1"}
LOOPBACK = {"host": "here", "address": "127.0.0.1"}  # of a host whose own name is 127.0.1.1


def in_namespace(expression: str) -> str:
    """Returns what an expression over choose_card and first_address is where CARDS are there."""
    code = "from tfbig.launching.rendezvous import choose_card, first_address\n"
    code += "from tfbig.errors import UserError\n"
    code += f"try: print({expression})\nexcept UserError as error: print(error)"
    done = subprocess.run(
        ["unshare", "--net", "bash", "-c", f"set -e{CARDS}exec {sys.executable} -"],
        input=code,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=REPOSITORY,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("others", "card"),
    [
        ([("there", "10.98.1.2")], "fast0"),
        ([("there", "10.98.2.2")], "slow0"),
        ([("there", "10.98.3.7")], "slow0"),  # through a gateway
        ([("here", "10.98.1.1"), ("there", "10.98.2.2")], "slow0"),
        ([("here", "10.98.1.1")], "lo"),
    ],
)
def test_the_card_that_leads_to_the_others(others, card):
    assert shutil.which("ip"), "tests/system needs iproute2"
    everyone = [HERE, *({"host": host, "address": address} for host, address in others)]
    assert in_namespace(f"choose_card(0, {everyone}, '')") == card


def test_the_users_card_goes_first_and_must_be_there():
    everyone = [HERE, {"host": "there", "address": "10.98.1.2"}]
    assert in_namespace(f"choose_card(0, {everyone}, 'slow0')") == "slow0"
    refused = in_namespace(f"choose_card(0, {everyone}, 'ib0')")
    assert refused.startswith("--network_interface=ib0 is no card of ")
    for name in ("docker0", "fast0", "lo", "slow0"):
        assert name in refused


def test_the_first_hosts_address_is_that_of_the_card_to_the_others():
    there = {"host": "there", "address": "10.98.2.2"}
    assert in_namespace(f"first_address({[LOOPBACK, LOOPBACK, there]})") == "10.98.2.1"
    assert in_namespace(f"first_address({[LOOPBACK, LOOPBACK]})") == "127.0.0.1"
