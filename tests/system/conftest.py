"""Two real hosts: network namespaces with their own names, addresses and sshd; needs root."""

import os
import subprocess

import pytest

from tests.system.on_hosts import TWO_HOSTS


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """Makes the hosts; what runs on them ends with them."""
    assert os.geteuid() == 0, "the hosts of tests/system need root"
    os.environ["TWO_HOSTS_DIR"] = str(tmp_path_factory.mktemp("hosts") / "two_hosts")
    subprocess.run([TWO_HOSTS, "down"], timeout=60)
    subprocess.run([TWO_HOSTS, "up"], check=True, timeout=60)
    yield
    subprocess.run([TWO_HOSTS, "down"], timeout=60)


@pytest.fixture
def healed(hosts):
    """Joins the hosts again after a test."""
    yield
    subprocess.run([TWO_HOSTS, "heal", "h2"], check=True, timeout=30)
