"""A server with a very small model, on a real socket."""

import contextlib
import dataclasses
import socket
import threading
import time

import httpx
import pytest

from tests.distributed.parity_worker import make_config
from tfbig.config import ModelConfig
from tfbig.serve_config import ServeConfig

NAME, MAX_LENGTH, VOCABULARY = "small", 128, 300
TEXT = "def main(arguments):\n    return [naïve(word) for word in arguments]\n" * 20


@pytest.fixture(scope="package")
def tokenizer():
    from data_pipeline.tokenizer import Tokenizer, train_tokenizer

    return Tokenizer(train_tokenizer([TEXT], VOCABULARY))


@pytest.fixture(scope="package")
def model(tokenizer):
    from tfbig.serving.chat import ChatTemplate
    from tfbig.serving.served_model import ServedModel, card_of
    from trainers.single import SingleTrainer

    config = make_config({"fields": {"strategy": "single"}})
    shape = ModelConfig(
        vocab_size=VOCABULARY, max_length=MAX_LENGTH, embed_dim=32, num_layers=2, num_heads=2,
        init_std=0.2,
    )  # fmt: skip
    config = dataclasses.replace(config, model=shape)
    trainer = SingleTrainer(config)
    trainer.build(training=False, vocab_size=tokenizer.vocab_size)
    served = ServedModel(NAME, trainer, tokenizer, ChatTemplate(), MAX_LENGTH, card_of(shape))
    served.warm_up(4)
    return served


@contextlib.contextmanager
def serving(model, send_buffer=0, **fields):
    """Runs a server in a thread; gives its address.

    Args:
      model: that answers.
      send_buffer: bytes that the machine takes of an answer that nobody reads; 0 leaves it.
      fields: of ServeConfig.
    """
    from tfbig.serving.app import Server
    from tfbig.serving.http_server import HttpServer

    config = ServeConfig(**{"num_rows": 4, "queue_size": 8, "drain_seconds": 5.0, **fields})
    listener = socket.socket()
    if send_buffer:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    listener.bind(("127.0.0.1", 0))
    server = HttpServer(Server(model, config).app, config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while not server.started:
            assert thread.is_alive() and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.02)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()
        assert not thread.is_alive(), "the server did not end"


@pytest.fixture(scope="package")
def address(model):
    with serving(model) as address:
        yield address


@pytest.fixture
def client(address):
    with httpx.Client(base_url=address, timeout=60) as client:
        yield client


@pytest.fixture
def openai_client(address):
    import openai

    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client


def gauge(address: str, name: str) -> float:
    """Returns a number of /metrics."""
    for line in httpx.get(f"{address}/metrics").text.splitlines():
        if line.startswith(f"{name} "):
            return float(line.split()[1])
    raise AssertionError(f"no {name} in /metrics")


def wait_for(condition, seconds: float = 30.0) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
