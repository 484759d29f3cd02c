"""Clients that are slow, silent, deaf or many, on bare sockets."""

import contextlib
import json
import socket
import time

import httpx

from tests.serving.conftest import serving, wait_for

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@contextlib.contextmanager
def connected(address: str, receive_buffer: int = 0):
    host, port = address.removeprefix("http://").split(":")
    with socket.socket() as client:
        if receive_buffer:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.settimeout(30)
        client.connect((host, int(port)))
        yield client


def answer_of(client: socket.socket) -> tuple[int, dict]:
    """Returns (status, JSON) of an answer that ends with the connection."""
    data = b""
    while piece := client.recv(1 << 16):
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def is_closed(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True


def test_what_is_no_http_is_refused_as_json(address):
    with connected(address) as client:
        client.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        status, body = answer_of(client)
    assert status == 400 and "no HTTP request" in body["error"]["message"]


def test_a_slow_head(model):
    with serving(model, body_seconds=1.0) as address:
        with connected(address) as dripping, connected(address) as silent:
            start = time.monotonic()
            with contextlib.suppress(ConnectionError):
                for byte in HEAD:
                    dripping.send(bytes([byte]))
                    time.sleep(0.1)
                    if time.monotonic() - start > 1.5:
                        break
            status, body = answer_of(dripping)
            assert status == 408 and "head did not arrive" in body["error"]["message"]
            assert silent.recv(1) == b"", "who says nothing is not answered"
            assert time.monotonic() - start < 8
        with connected(address) as second:
            # The head of a second request on a connection has its time, too.
            second.sendall(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200" in second.recv(4096).splitlines()[0]
            second.sendall(b"GET /ping HT")
            assert answer_of(second)[0] == 408


def test_a_dripping_body(model):
    """Bytes that keep coming do not lengthen the time that a body has."""
    with serving(model, body_seconds=1.0) as address, connected(address) as client:
        start = time.monotonic()
        client.sendall(HEAD + b"Content-Length: 1000\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - start < 2.0:
                client.send(b" ")
                time.sleep(0.1)
        assert b" 408 " in client.recv(4096).splitlines()[0]


def test_too_many_connections(model):
    with serving(model, max_connections=2, body_seconds=30.0) as address:
        with contextlib.ExitStack() as stack:
            for _ in range(2):
                stack.enter_context(connected(address))
            asked = {"prompt": "a", "max_tokens": 1}
            answer = httpx.post(f"{address}/v1/completions", json=asked, timeout=30)
            assert answer.status_code == 429 and answer.headers["Retry-After"] == "1"
            assert answer.json()["error"]["code"] == "too_many_connections"
            assert httpx.get(f"{address}/ping").status_code == 200, "probes are answered"
            for _ in range(2):
                stack.enter_context(connected(address))
            assert is_closed(stack.enter_context(connected(address)))
        wait_for(lambda: httpx.post(f"{address}/v1/completions", json=asked).status_code == 200)


def test_who_does_not_read_keeps_no_place(model):
    """The whole queue is taken by a client that never reads; its time is the request's."""
    fields = {"queue_size": 4, "num_rows": 4, "request_seconds": 3.0, "body_seconds": 2.0}
    with serving(model, send_buffer=4096, **fields) as address:
        body = {"prompt": "a", "n": 8, "max_tokens": 120, "ignore_eos": True, "logprobs": 20}
        data = json.dumps({**body, "stream": True}).encode()
        url, asked = f"{address}/v1/completions", {"prompt": "a", "max_tokens": 1}
        with connected(address, receive_buffer=4096) as deaf:
            deaf.sendall(HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(data), data))
            wait_for(lambda: httpx.post(url, json=asked, timeout=30).status_code == 429)
            wait_for(lambda: httpx.post(url, json=asked, timeout=30).status_code == 200)
            received = 0
            with contextlib.suppress(ConnectionError):  # reset: what was unsent is gone
                while piece := deaf.recv(1 << 16):
                    received += len(piece)
            assert received < 200_000, "it got all of it after all"


def test_an_answer_that_nobody_reads_is_dropped(model):
    """A whole answer lies in our memory until it is read, but not for ever."""
    with serving(model, send_buffer=4096, body_seconds=2.0, max_connections=1) as address:
        body = {"prompt": "a", "n": 8, "max_tokens": 120, "ignore_eos": True, "logprobs": 20}
        data = json.dumps(body).encode()
        with connected(address, receive_buffer=4096) as deaf:
            head = HEAD + b"Connection: close\r\n"
            deaf.sendall(head + b"Content-Length: %d\r\n\r\n%s" % (len(data), data))
            url, asked = f"{address}/v1/completions", {"prompt": "a", "max_tokens": 1}
            assert httpx.post(url, json=asked, timeout=30).status_code == 429
            wait_for(lambda: httpx.post(url, json=asked, timeout=30).status_code == 200)
