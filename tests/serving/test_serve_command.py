"""`tfbig serve` as a user runs it: a run's model answers, and a signal ends it politely."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file

from data_pipeline.tokenizer import train_tokenizer
from tests.distributed.launch import REPOSITORY
from tfbig import serve, train
from tfbig.errors import UserError
from tfbig.generation.completion import Completion
from tfbig.generation.engine import write_all
from tfbig.generation.sampling import SamplingOptions
from tfbig.serve_config import ServeConfig
from tfbig.serving.http_server import HttpServer
from tfbig.serving.served_model import load_model


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, small_flags) -> str:
    folder = str(tmp_path_factory.mktemp("runs") / "first")
    assert train._body([*small_flags, f"--run_dir={folder}", "--steps=2", "--eval_every=0"]) == 0
    return folder


@contextlib.contextmanager
def served(run_dir: str, *flags: str, **variables: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """Gives `tfbig serve` and the address that it says."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **variables}
    command = [sys.executable, "-m", "tfbig.serve", f"--run={run_dir}", "--port=0", "--num_rows=2"]
    server = subprocess.Popen(
        [*command, *flags],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    watch = threading.Timer(180, server.kill)
    watch.start()
    try:
        assert server.stdout is not None and server.stderr is not None
        line = server.stdout.readline()
        found = re.fullmatch(r"serving first at (http://127.0.0.1:\d+) \(Ctrl-C ends\)\n", line)
        assert found, line + server.stderr.read()
        yield server, found[1]
    finally:
        watch.cancel()
        server.kill()
        server.communicate()


def test_a_run_is_served_until_a_signal(run_dir):
    with served(run_dir, TFBIG_API_KEY="k") as (server, address):
        with httpx.Client(base_url=address, timeout=120) as client:
            assert client.get("/v1/models").status_code == 401, "the environment's key holds"
            client.headers["Authorization"] = "Bearer k"
            (card,) = client.get("/v1/models").json()["data"]
            assert card["id"] == "first" and card["card"]["checkpoint_step"] == 2
            page = client.get("/")
            assert "<title>tfbig</title>" in page.text and "http" not in page.text
            assert "default-src 'none'" in page.headers["content-security-policy"]
            asked = {"prompt": "def", "max_tokens": 25, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/completions", json=asked) as stream:
                lines = stream.iter_lines()
                next(lines)
                server.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
        assert server.wait(60) == 0
        log = server.stderr.read()
        assert "Traceback" not in log and '"event":"stop"' in log


def test_curl_as_the_documentation_has_it(run_dir):
    """And then a signal while a body is still awaited: it is given its time, and no more."""
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    page = (REPOSITORY / "docs" / "serving.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^curl .*$", page, re.MULTILINE)
    with served(run_dir, "--drain_seconds=1", "--body_seconds=100") as (server, address):
        command = shlex.split(line.replace("http://127.0.0.1:8080", address))
        # The run of this test has few positions.
        command = [part.replace('"max_tokens": 40', '"max_tokens": 20') for part in command]
        done = subprocess.run([curl, *command[1:]], capture_output=True, text=True, timeout=120)
        events = [event for event in done.stdout.splitlines() if event]
        assert done.returncode == 0 and events[-1] == "data: [DONE]", done
        assert len(events) > 5 and all(event.startswith("data: {") for event in events[:-1])
        host, _, port = address.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=60) as slow:
            slow.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"
                b"Content-Type: application/json\r\nExpect: 100-continue\r\n\r\n"
            )
            assert b" 100 " in slow.recv(4096), "the body is awaited"
            with socket.create_connection((host, int(port)), timeout=60) as other:
                other.sendall(b"no HTTP\r\n\r\n")
                assert b" 400 " in other.recv(4096).splitlines()[0]
            server.send_signal(signal.SIGTERM)
            start = time.monotonic()
            assert b" 503 " in slow.recv(4096).splitlines()[0]
            assert server.wait(60) == 0 and time.monotonic() - start < 30
        log = server.stderr.read()
        assert '"event":"stop"' in log and "Traceback" not in log
        assert '"event":"refused","status":400' in log
        assert all(line.startswith("{") for line in log.splitlines())


def test_a_signal_as_soon_as_it_serves(run_dir):
    with served(run_dir) as (server, _):
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        assert '"event":"stop"' in server.stderr.read()


def test_what_happens_around_the_start():
    """It says that it serves when clients can connect; a signal that came before is not lost."""

    async def app(scope, receive, send):
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})

    with serve.listen("127.0.0.1", 0) as listener:
        connected = []

        def connect():
            with socket.create_connection(listener.getsockname(), timeout=10):
                connected.append(True)

        server = HttpServer(app, ServeConfig(), connect)
        server.leave(signal.SIGTERM, None)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive() and connected == [True]


BAD = {
    "no run": ({"run": ""}, "--run is missing"),
    "rows": ({"num_rows": 0}, "--num_rows=0 must be at least 1"),
    "port": ({"port": 70000}, "--port=70000"),
    "queue": ({"queue_size": 0, "num_rows": 1}, "never fit into"),
    "connections": ({"max_connections": 0}, "--max_connections=0 must be at least 1"),
    "time": ({"request_seconds": 0.0}, "--request_seconds=0.0 must be above 0"),
    "host": ({"host": "256.1.1.1"}, "cannot listen on --host=256.1.1.1"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_flags(name, run_dir):
    fields, words = BAD[name]
    with pytest.raises(UserError) as error:
        serve.run(ServeConfig(**{"run": run_dir, "port": 0, **fields}), {})
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_taken_port(run_dir):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"--port={port}: Address already in use"):
            serve.run(ServeConfig(run=run_dir, port=port), {})


@pytest.mark.parametrize("name", ["gpt2_n_inner", "gpt_neox"])
def test_a_hugging_face_folder_is_served(name, tmp_path):
    """Its logits through the cache are those that transformers gave, its greedy ids so too."""
    golden = REPOSITORY / "tests" / "interop" / "golden"
    folder = tmp_path / "model"
    shutil.copytree(golden / name, folder)
    with pytest.raises(UserError, match="cannot read tokenizer"):
        load_model(ServeConfig(run=str(folder)), {})
    tokenizer = train_tokenizer(["some text"], 257)
    # GPT-2's own folders have a vocabulary and merges in place of it.
    parts = json.loads(tokenizer)["model"]
    (folder / "vocab.json").write_text(json.dumps(parts["vocab"]), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    assert not parts["merges"]
    assert load_model(ServeConfig(run=str(folder)), {}).tokenizer.vocab_size == 257
    (folder / "tokenizer.json").write_bytes(tokenizer)
    model = load_model(ServeConfig(run=str(folder)), {})
    assert model.name == "model" and model.card["layers"] == 2
    expected = load_file(golden / f"{name}.safetensors")
    tokens, wanted = expected["tokens"], expected["logits"][0, :, :257]
    cache = model.trainer.new_cache(1, model.max_length)
    row, fed = np.zeros(1, np.int32), 0
    for count in (8, *[1] * (tokens.shape[1] - 8)):
        piece = tokens[:, fed : fed + count]
        number = np.array([count], np.int32)
        logits, cache = model.trainer.decode_step(piece, number, row, np.array([fed == 0]), cache)
        fed += count
        np.testing.assert_allclose(logits[0, :257], wanted[fed - 1], atol=1e-4)
    completion = Completion(tokens[0].tolist(), SamplingOptions(temperature=0), 1)
    write_all(model.make_engine(2), [completion])
    assert completion.written == [int(wanted[-1].argmax())]


def test_no_key_is_shown():
    assert "hush" not in repr(ServeConfig(api_key="hush"))
