"""A host that is gone is named when the ranks' connection breaks."""

import socket
import time

import pytest

from tfbig import lost_host
from tfbig.errors import RunError
from tfbig.lost_host import answers, lost_hosts_named, silent_hosts
from tfbig.run_folder import RunFolder
from tfbig.watchdog import Watchdog

SHUT_DOWN = "Horovod has been shut down. This was caused by an exception on one of the ranks"
CUT = "Application timeout caused pair closure [[{{node HorovodGroupedAllreduce_0}}]]"
# Of an operation with a name of ours, as two hosts printed it.
TIMED_OUT = """Graph execution error: Detected at node data.sums defined at (most recent call last):
File "/env/site-packages/horovod/tensorflow/mpi_ops.py", line 130, in _allreduce
[/b/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 60000ms for recv operation
\t [[{{node data.sums}}]]"""


def test_hosts_that_are_there_answer(monkeypatch):
    assert answers("127.0.0.1")  # open or closed

    def unreachable(address, timeout):
        raise OSError(113, "No route to host")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    assert not answers("192.0.2.1")

    def unknown(address, timeout):
        raise socket.gaierror

    monkeypatch.setattr(socket, "create_connection", unknown)
    assert answers("nowhere")


def test_each_other_host_is_asked_once(monkeypatch):
    asked = []
    monkeypatch.setattr(lost_host, "answers", lambda host: asked.append(host) or host != "c")
    found = silent_hosts(dict(enumerate("abbcc")), "a")
    assert found == {"c": [3, 4]} and sorted(asked) == ["b", "c"]


def test_the_engines_error_becomes_a_line_with_the_host(monkeypatch):
    hosts = {0: socket.gethostname(), 1: "h2"}
    monkeypatch.setattr(lost_host, "answers", lambda host: False)
    for text in (SHUT_DOWN, CUT, TIMED_OUT):
        with pytest.raises(RunError, match=r"host h2 \(rank 1\) no longer answers"):
            with lost_hosts_named(hosts):
                raise RuntimeError(text)
    with pytest.raises(KeyError), lost_hosts_named(hosts):
        raise KeyError("another fault")
    monkeypatch.setattr(lost_host, "answers", lambda host: True)
    with pytest.raises(RuntimeError, match="Horovod has been"), lost_hosts_named(hosts):
        raise RuntimeError(SHUT_DOWN)


@pytest.mark.parametrize("rank", [0, 1])
def test_hosts_of_ranks_that_have_ended_are_known(rank, tmp_path):
    """A lost host's ranks may have found out, and removed their files, before anyone asks."""
    folder = RunFolder(tmp_path)
    with Watchdog(folder, rank, 2, 0.4) as watchdog:
        with Watchdog(folder, 1 - rank, 2, 0.4):
            deadline = time.monotonic() + 20
            while len(watchdog.hosts) < 2:
                assert time.monotonic() < deadline
                watchdog.pulse.enter("step")
                time.sleep(0.02)
        time.sleep(0.3)
        assert watchdog.hosts == dict.fromkeys((0, 1), socket.gethostname())
