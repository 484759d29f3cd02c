"""What the server refuses, gives up and survives."""

import dataclasses
import gc
import json
import socket
import threading
import time
import weakref

import httpx
import pytest

from tests.serving.conftest import gauge, serving, wait_for

LONG = {"prompt": "def", "max_tokens": 120, "ignore_eos": True}


def running(address: str) -> float:
    return gauge(address, "tfbig_texts_running") + gauge(address, "tfbig_texts_waiting")


def slowed(model, seconds: float):
    """The model with steps that take longer, so that there is time to leave."""

    class Slow:
        def __init__(self, trainer):
            self._trainer = trainer
            self.new_cache = trainer.new_cache

        def decode_step(self, *arguments):
            time.sleep(seconds)
            return self._trainer.decode_step(*arguments)

    return dataclasses.replace(model, trainer=Slow(model.trainer))


def test_sagemaker(client):
    assert client.get("/ping").status_code == 200
    parameters = {"max_new_tokens": 6, "return_full_text": False}
    asked = {"inputs": "def main(", "parameters": parameters}
    answer = client.post("/invocations", json=asked)
    (found,) = answer.json()
    assert answer.status_code == 200 and list(found) == ["generated_text"]
    greedy = client.post(
        "/v1/completions", json={"prompt": "def main(", "max_tokens": 6, "temperature": 0}
    ).json()["choices"][0]["text"]
    assert found["generated_text"] == greedy
    whole = client.post("/invocations", json={"inputs": "def main("}).json()[0]["generated_text"]
    assert whole.startswith("def main(" + greedy)
    several = client.post(
        "/invocations",
        json={"inputs": ["a", "b"], "parameters": {"num_return_sequences": 2, "do_sample": True}},
    ).json()
    assert [len(texts) for texts in several] == [2, 2]
    assert several[0][0] != several[0][1]
    asked = {**asked, "stream": True, "parameters": {**parameters, "return_full_text": True}}
    with client.stream("POST", "/invocations", json=asked) as stream:
        events = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    assert stream.headers["Content-Type"].startswith("text/event-stream")
    assert events[-1] == "[DONE]" and len(events) > 3
    pieces = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
    assert "".join(pieces) == "def main(" + greedy
    for body, words in (
        ({}, "inputs is missing"),
        ({"inputs": 3}, "inputs must be a string"),
        ({"inputs": "a", "parameters": 1}, "parameters must be an object"),
        ({"inputs": "a", "parameters": {"num_beams": 4}}, "num_beams is not supported"),
    ):
        answer = client.post("/invocations", json=body)
        assert answer.status_code == 400 and words in answer.json()["error"]["message"]
    chat = client.post("/invocations", json={"messages": [{"role": "user", "content": "a"}],
                                             "max_tokens": 2})  # fmt: skip
    assert chat.json()["object"] == "chat.completion"


def test_bodies(client, model):
    def post(content, **headers):
        headers = {"Content-Type": "application/json", **headers}
        return client.post("/v1/completions", content=content, headers=headers)

    for content, status in (
        (b"", 400), (b"{", 400), (b"[]", 400), (b"null", 400), (b'{"prompt": "\xff"}', 400),
        (b'{"prompt": "\\ud800"}', 400), (b'{"prompt": NaN}', 400), (b"[" * 100_000, 400),
        (b'{"prompt": "a", "max_tokens": 1e400}', 400),
        (b'{"prompt": "a", "user": ' + b"[" * 1000 + b"]" * 1000 + b"}", 400),
        (b'{"prompt": "a", "seed": 123456789012345678901234567890}', 400),
    ):  # fmt: skip
        answer = post(content)
        assert answer.status_code == status, content[:40]
        assert answer.json()["error"]["message"]
    assert post(b"{}", **{"Content-Type": "text/plain"}).status_code == 415
    assert client.get("/v1/completions").status_code == 405
    with serving(model, max_body_bytes=1000, body_seconds=0.5) as address:
        url = f"{address}/v1/completions"
        assert httpx.post(url, json={"prompt": "a" * 1000}).status_code == 413

        def chunks():
            for _ in range(20):
                yield b"a" * 100

        kind = {"Content-Type": "application/json"}
        assert httpx.post(url, content=chunks(), headers=kind).status_code == 413
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as slow:
            slow.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\n"
                b'Content-Length: 100\r\n\r\n{"prom'
            )
            assert b" 408 " in slow.recv(4096).split(b"\r\n")[0]


def test_a_full_queue(model):
    with serving(slowed(model, 0.02), num_rows=1, queue_size=1, max_choices=2) as address:
        url = f"{address}/v1/completions"
        answers: list[httpx.Response] = []

        def ask():
            answers.append(httpx.post(url, json=LONG, timeout=60))

        threads = [threading.Thread(target=ask) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429, 429]
        for answer in answers:
            if answer.status_code == 429:
                assert 1 <= int(answer.headers["Retry-After"]) <= 60
                assert answer.json()["error"]["code"] == "queue_full"
        assert httpx.post(url, json={**LONG, "max_tokens": 1}).status_code == 200


def test_a_deadline(model):
    with serving(slowed(model, 0.05), request_seconds=3.0) as address:
        answer = httpx.post(f"{address}/v1/completions", json=LONG, timeout=60)
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
        with httpx.stream(
            "POST", f"{address}/v1/completions", json={**LONG, "stream": True}, timeout=60
        ) as stream:
            events = [line for line in stream.iter_lines() if line]
        assert stream.status_code == 200 and len(events) > 2
        assert json.loads(events[-1].removeprefix("data: "))["error"]["type"] == "timeout_error"
        wait_for(lambda: running(address) == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_frees_the_row(model, stream):
    with serving(slowed(model, 0.25), num_rows=2) as address:
        host, port = address.removeprefix("http://").split(":")
        body = json.dumps({**LONG, "n": 2, "stream": stream}).encode()
        with socket.create_connection((host, int(port)), timeout=20) as leaving:
            leaving.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            wait_for(lambda: running(address) == 2)
        asked = {"prompt": "a", "max_tokens": 2}
        assert httpx.post(f"{address}/v1/completions", json=asked, timeout=60).status_code == 200
        wait_for(lambda: running(address) == 0)
        assert gauge(address, "tfbig_generation_tokens_total") < 240, "both were written to the end"


def test_a_failing_model_is_an_error_and_the_server_goes_on(model, capfd):
    class Failing:
        def __init__(self, trainer):
            self._trainer, self.fails = trainer, True
            self.new_cache = trainer.new_cache

        def decode_step(self, *arguments):
            if self.fails:
                raise RuntimeError("out of memory")
            return self._trainer.decode_step(*arguments)

    trainer = Failing(model.trainer)
    with serving(dataclasses.replace(model, trainer=trainer)) as address:
        url = f"{address}/v1/completions"
        answer = httpx.post(url, json=LONG, timeout=60)
        assert answer.status_code == 500 and "Traceback" not in answer.text
        assert answer.json()["error"]["type"] == "api_error"
        trainer.fails = False
        assert httpx.post(url, json=LONG, timeout=60).status_code == 200
        assert httpx.get(f"{address}/health").status_code == 200
    assert "out of memory" in capfd.readouterr().err


def test_a_failed_cache_goes_before_a_new_one_comes(model):
    """Where the cache is most of what a device holds, there is no room for two."""
    caches, left = [], []

    class Failing:
        def __init__(self, trainer):
            self._trainer = trainer

        def new_cache(self, *arguments):
            gc.collect()
            left.extend(reference() is not None for reference in caches)
            cache = self._trainer.new_cache(*arguments)
            caches.append(weakref.ref(cache))
            return cache

        def decode_step(self, tokens, num_valid, source_row, reset, cache):
            self._trainer.decode_step(tokens, num_valid, source_row, reset, cache)
            raise RuntimeError("out of memory")

    with serving(dataclasses.replace(model, trainer=Failing(model.trainer))) as address:
        answer = httpx.post(f"{address}/v1/completions", json=LONG, timeout=60)
        assert answer.status_code == 500
        wait_for(lambda: len(caches) == 2)
    assert left == [False]


class OtherTokenizer:
    """The model's, but for how it encodes."""

    def __init__(self, tokenizer, encode):
        self._tokenizer, self.encode = tokenizer, encode

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)


def test_a_fault_of_ours_is_json(model, capfd):
    def encode(text):
        raise RuntimeError("a fault that nobody foresaw")

    faulty = OtherTokenizer(model.tokenizer, encode)
    with serving(dataclasses.replace(model, tokenizer=faulty)) as address:
        answer = httpx.post(f"{address}/v1/completions", json=LONG)
        assert answer.status_code == 500 and answer.json()["error"]["type"] == "api_error"
        assert "foresaw" not in answer.text and answer.headers["X-Request-Id"]
    shown = capfd.readouterr().err
    assert "a fault that nobody foresaw" in shown and '"event":"fault"' in shown


def test_tokenizing_keeps_nobody_waiting(model):
    begun, ends = threading.Event(), threading.Event()

    def encode(text):
        begun.set()
        assert ends.wait(60)
        return model.tokenizer.encode(text)

    slow = OtherTokenizer(model.tokenizer, encode)
    with serving(dataclasses.replace(model, tokenizer=slow)) as address:
        answers = []

        def ask():
            answers.append(httpx.post(f"{address}/v1/completions", json=LONG, timeout=60))

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            assert begun.wait(30)
            assert httpx.get(f"{address}/ping", timeout=10).status_code == 200
        finally:
            ends.set()
            asking.join(60)
        assert answers[0].status_code == 200


def test_the_log(model, capfd):
    with serving(model) as address:
        url = f"{address}/v1/completions"
        asked = {"prompt": "a very secret prompt", "max_tokens": 3}
        answer = httpx.post(url, json=asked, headers={"X-Request-Id": "mine-1"})
        assert answer.headers["X-Request-Id"] == "mine-1"
        streamed = httpx.post(
            url, json={**asked, "stream": True}, headers={"X-Request-Id": "bad\tid"}
        )
        other = streamed.headers["X-Request-Id"]
        assert len(other) == 32
        httpx.post(url, content=b"{", headers={"Content-Type": "application/json"})
    shown = capfd.readouterr().err
    assert "secret" not in shown
    lines = [json.loads(line) for line in shown.splitlines() if line.startswith("{")]
    first, second, third = lines[:3]
    assert first["request_id"] == "mine-1" and first["status"] == 200
    assert first["completion_tokens"] == 3 and first["finish_reasons"] == ["length"]
    assert second["request_id"] == other and second["completion_tokens"] == 3
    assert third["status"] == 400


def test_metrics(client, address):
    before = gauge(address, "tfbig_generation_tokens_total")
    client.post("/v1/completions", json={"prompt": "a", "max_tokens": 7, "ignore_eos": True})
    wait_for(lambda: gauge(address, "tfbig_generation_tokens_total") == before + 7)
    assert gauge(address, "tfbig_time_to_first_token_seconds_count") >= 1
