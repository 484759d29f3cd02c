"""`tfbig serve` as a user runs it: a run's model answers, and a signal ends it politely."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading

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
from tfbig.serving.served_model import load_model


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, small_flags) -> str:
    folder = str(tmp_path_factory.mktemp("runs") / "first")
    assert train._body([*small_flags, f"--run_dir={folder}", "--steps=2", "--eval_every=0"]) == 0
    return folder


def test_a_run_is_served_until_a_signal(run_dir):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TFBIG_API_KEY": "k"}
    command = [sys.executable, "-m", "tfbig.serve", f"--run={run_dir}", "--port=0", "--num_rows=2"]
    server = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None and server.stderr is not None
        watch = threading.Timer(180, server.kill)
        watch.start()
        line = server.stdout.readline()
        found = re.fullmatch(r"serving first at (http://127.0.0.1:\d+) \(Ctrl-C ends\)\n", line)
        assert found, line + server.stderr.read()
        with httpx.Client(base_url=found[1], timeout=120) as client:
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
        watch.cancel()
    finally:
        server.kill()
        server.wait()


BAD = {
    "no run": ({"run": ""}, "--run is missing"),
    "rows": ({"num_rows": 0}, "--num_rows=0 must be at least 1"),
    "port": ({"port": 70000}, "--port=70000"),
    "queue": ({"queue_size": 0, "num_rows": 1}, "never fit into"),
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
    (folder / "tokenizer.json").write_bytes(train_tokenizer(["some text"], 257))
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
