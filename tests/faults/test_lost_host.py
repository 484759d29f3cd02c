"""A host that is gone is named when the ranks' connection breaks."""

import socket

import pytest

from tfbig import lost_host
from tfbig.errors import RunError
from tfbig.heartbeat import Heartbeats, Pulse
from tfbig.lost_host import answers, lost_hosts_named, silent_hosts
from tfbig.run_folder import RunFolder

SHUT_DOWN = "Horovod has been shut down. This was caused by an exception on one of the ranks"
CUT = "Application timeout caused pair closure [[{{node HorovodGroupedAllreduce_0}}]]"


def heartbeats(*hosts):
    return {rank: {"host": host} for rank, host in enumerate(hosts)}


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
    found = silent_hosts(heartbeats("a", "b", "b", "c", "c"), "a")
    assert found == {"c": [3, 4]} and sorted(asked) == ["b", "c"]


def test_the_engines_error_becomes_a_line_with_the_host(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    for rank, host in ((1, "h2"), (0, "h1")):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        Heartbeats(folder.heartbeats_dir, rank, 2).write(Pulse())
    monkeypatch.setattr(lost_host, "answers", lambda host: False)
    for text in (SHUT_DOWN, CUT):
        with pytest.raises(RunError, match=r"host h2 \(rank 1\) no longer answers"):
            with lost_hosts_named(folder, 0, 2):
                raise RuntimeError(text)
    with pytest.raises(KeyError), lost_hosts_named(folder, 0, 2):
        raise KeyError("another fault")
    monkeypatch.setattr(lost_host, "answers", lambda host: True)
    with pytest.raises(RuntimeError, match="Horovod has been"), lost_hosts_named(folder, 0, 2):
        raise RuntimeError(SHUT_DOWN)
