"""Load and malformed requests against a server with a small model of random weights.

usage: python -m benchmarks.serve [--quick]

The server is a process of its own; this one only asks. Both share the machine's cores.
"""

import asyncio
import dataclasses
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable

import psutil

from tfbig.command import quiet_tensorflow

quiet_tensorflow()

ROWS, TOKENS = 8, 32
PROMPT = "def main(arguments):\n    "
CLIENTS, SECONDS, MALFORMED = (200, 60, 2000)
QUICK_CLIENTS, QUICK_SECONDS, QUICK_MALFORMED = (60, 8, 300)


# The server, in a process of its own.


def serve(port: int) -> None:
    """Serves the preset gpt_tiny with initial weights until it is killed."""
    from data_pipeline.tokenizer import Tokenizer, train_tokenizer
    from tfbig import presets
    from tfbig.config import ParallelConfig
    from tfbig.serve_config import ServeConfig
    from tfbig.serving.app import Server
    from tfbig.serving.chat import ChatTemplate
    from tfbig.serving.http_server import HttpServer
    from tfbig.serving.served_model import ServedModel
    from trainers.single import SingleTrainer

    tokenizer = Tokenizer(train_tokenizer([PROMPT * 50], 300))
    config = presets.preset("gpt_tiny")
    config = dataclasses.replace(config, parallel=ParallelConfig(strategy="single"))
    trainer = SingleTrainer(config)
    trainer.build(training=False, vocab_size=tokenizer.vocab_size)
    length = config.model.max_length
    model = ServedModel("gpt_tiny", trainer, tokenizer, ChatTemplate(), length, {})
    model.warm_up(ROWS)
    # Deadlines are not what is measured: a slow machine must not run into them.
    limits = ServeConfig(num_rows=ROWS, queue_size=64, body_seconds=2.0, request_seconds=600.0)
    server = HttpServer(Server(model, limits).app, limits)
    sys.stderr = open(os.devnull, "w")  # the access log, for the rest of its life
    with socket.create_server(("127.0.0.1", port)) as listener:
        server.run([listener])


class ServerProcess:
    """The server as this process sees it."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "benchmarks.serve", f"--serve={self.port}"]
        self._process = subprocess.Popen(command)

    async def wait(self, seconds: float = 240.0) -> None:
        """Waits until it answers."""
        deadline = time.monotonic() + seconds
        while True:
            assert self._process.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server did not start"
            try:
                if (await ask(self.port, request("GET", "/ping"))).status == 200:
                    return
            except OSError:
                await asyncio.sleep(0.2)

    @property
    def megabytes(self) -> float:
        """Resident memory."""
        return psutil.Process(self._process.pid).memory_info().rss / 1e6

    def end(self) -> None:
        """Kills it."""
        self._process.kill()
        self._process.wait()


# A client that costs little.


@dataclasses.dataclass
class Answer:
    """What came back."""

    status: int  # 0: the connection was closed without an answer
    body: bytes
    first_seconds: float  # until the first event of a stream
    retry_seconds: float = 0.0  # after which it says to come back


def request(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    """Returns a request's bytes."""
    fields = {"Host": "localhost", "Connection": "close", "Content-Type": "application/json"}
    fields |= {"Content-Length": str(len(body))} | headers
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + body


def completion(**fields: object) -> bytes:
    """Returns a request for a text."""
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "stream": True, **fields}
    return request("POST", "/v1/completions", json.dumps(body).encode())


async def ask(port: int, data: bytes, timeout: float = 600.0) -> Answer:
    """Sends a request and reads all of its answer."""
    start = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        await writer.drain()
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), timeout)
        # A stream's head is sent before its first token.
        first = await asyncio.wait_for(reader.read(1 << 16), timeout)
        first_seconds = time.monotonic() - start
        rest = await asyncio.wait_for(reader.read(), timeout)
        lines = dict(line.lower().partition(b": ")[::2] for line in head.split(b"\r\n"))
        retry_seconds = float(lines.get(b"retry-after", 0))
        return Answer(int(head.split(b" ", 2)[1]), first + rest, first_seconds, retry_seconds)
    except (asyncio.IncompleteReadError, ConnectionError):
        return Answer(0, b"", 0.0)
    finally:
        writer.close()


# What is measured.


async def tokens_per_second(port: int, num_clients: int, seconds: float) -> float:
    """Returns what clients that ask one text after the other are given together."""
    end = time.monotonic() + seconds
    count = 0

    async def client() -> None:
        nonlocal count
        while time.monotonic() < end:
            answer = await ask(port, completion())
            assert answer.status == 200, answer
            count += TOKENS

    start = time.monotonic()
    await asyncio.gather(*(client() for _ in range(num_clients)))
    return count / (time.monotonic() - start)


async def load(server: ServerProcess, num_clients: int, seconds: float) -> None:
    """Many clients at once; those that are refused come back when they are told to."""
    end = time.monotonic() + seconds
    statuses: Counter[int] = Counter()
    first_seconds: list[float] = []
    num_broken = 0

    async def client(index: int) -> None:
        nonlocal num_broken
        await asyncio.sleep(index / num_clients)
        while time.monotonic() < end:
            answer = await ask(server.port, completion(seed=index))
            statuses[answer.status] += 1
            if answer.status == 200:
                first_seconds.append(answer.first_seconds)
                num_broken += not answer.body.rstrip().endswith(b"0")  # the last chunk
                num_broken += b"[DONE]" not in answer.body
            else:
                await asyncio.sleep(answer.retry_seconds or 1.0)

    async def memory() -> list[float]:
        seen = []
        while time.monotonic() < end:
            seen.append(server.megabytes)
            await asyncio.sleep(0.5)
        return seen

    watching = asyncio.create_task(memory())
    await asyncio.gather(*(client(index) for index in range(num_clients)))
    seen = await watching
    title = f"{num_clients} clients for {seconds:g} s"
    others = sum(count for status, count in statuses.items() if status not in (200, 429))
    bad = others + num_broken
    print(f"{title}: answers by status {dict(statuses)}, memory {seen[0]:.0f} to {seen[-1]:.0f} MB")
    bar(f"{title}, errors but 429", "0", f"{bad}", bad == 0 and statuses[200] > 0)
    early = statistics.median(seen[len(seen) // 4 : len(seen) // 2])
    late = statistics.median(seen[3 * len(seen) // 4 :])
    growth = late / early - 1
    bar(f"{title}, memory, last quarter / second", "<= 1.05", f"{1 + growth:.3f}", growth <= 0.05)
    first_seconds.sort()
    p99 = first_seconds[int(0.99 * (len(first_seconds) - 1))]
    median = statistics.median(first_seconds)
    print(f"{title}, time to first token: median {median:.2f} s, p99 {p99:.2f} s")
    bar(f"{title}, p99 time to first token", "reported", f"{p99:.2f} s", True)


def bar(name: str, wanted: str, measured: str, reached: bool) -> None:
    """Prints one bar's line."""
    print(f"{name} | {wanted} | {measured} | {'yes' if reached else 'no'}", flush=True)


FIELDS = (
    "prompt max_tokens n temperature top_p top_k logprobs stop stream seed logit_bias echo suffix"
    " best_of stop_token_ids stream_options presence_penalty model messages min_p"
).split()
BROKEN = (
    None, True, -1, 10**40, 1e308, -1e308, "x" * 10_000, [], {}, [[]], [{}], [None], {"a": []},
    ["a"] * 1000, [-1], [10**12], "\ud800", 0.5, {"99999999": 1}, {"-1": 0}, [[1, "a"]],
)  # fmt: skip
# Values that a field may have after all.
HARMLESS = {None, True, 0.5}


def malformed(chance: random.Random) -> bytes:
    """Returns a request that must not be answered with a text."""
    path = chance.choice(("/v1/completions", "/v1/chat/completions", "/invocations"))
    good = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "inputs": "a"}
    kind = chance.randrange(7)
    if kind == 0:  # no JSON
        return request("POST", path, chance.randbytes(chance.randrange(200)))
    if kind == 1:  # JSON, cut off
        text = json.dumps(good).encode()
        return request("POST", path, text[: chance.randrange(len(text) - 1)])
    if kind == 2:  # bad UTF-8 or deep nesting
        body = b'{"prompt": "\xff\xfe"}' if chance.random() < 0.5 else b'{"prompt":' + b"[" * 50_000
        return request("POST", path, body)
    if kind == 3:  # other paths, methods, types
        return chance.choice(
            (
                request("POST", "/v1/nothing"),
                request("PUT", path, b"{}"),
                request("POST", path, b"{}", **{"Content-Type": "text/plain"}),
                request("POST", path, b"{}", **{"Content-Length": "-1"}),
                b"POST " + chance.randbytes(20) + b"\r\n\r\n",
            )
        )
    if kind == 4:  # larger than allowed, as it says
        return request("POST", path, b"", **{"Content-Length": str(10**9)})
    values = [value for value in BROKEN if not _is_harmless(value)]
    wrong = {field: chance.choice(values) for field in chance.sample(FIELDS, 3)}
    return request("POST", "/v1/completions", json.dumps({"prompt": 7, **wrong}).encode())


def _is_harmless(value: object) -> bool:
    return isinstance(value, (bool, float, type(None))) and value in HARMLESS


async def early_leaver(port: int, chance: random.Random) -> None:
    """Sends some of a request and goes away, at once or slowly."""
    data = completion(max_tokens=200)
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data[: chance.randrange(1, len(data) + 1)])
    await writer.drain()
    await asyncio.sleep(chance.choice((0.0, 0.05, 0.3)))
    writer.close()


async def fuzz(server: ServerProcess, count: int) -> None:
    """Malformed requests, slow bodies and early leavers."""
    chance = random.Random(0)
    statuses: Counter[int] = Counter()
    examples: dict[int, bytes] = {}

    async def one(data: bytes) -> None:
        answer = await ask(server.port, data, 30.0)
        statuses[answer.status] += 1
        examples.setdefault(answer.status, data[:300])

    async def batch(size: int) -> None:
        jobs: list[Awaitable[None]] = []
        for _ in range(size):
            if chance.random() < 0.1:
                jobs.append(early_leaver(server.port, chance))
            else:
                jobs.append(one(malformed(chance)))
        await asyncio.gather(*jobs)

    # As many at a time as the server has connections for: what it refuses unread tests nothing.
    for round_number in range(20):
        if round_number == 5:
            before = server.megabytes
        await batch(count // 20)
    # A body that never ends is given up.
    cut = completion()[:-5]
    await asyncio.gather(*(one(cut) for _ in range(10)))
    await asyncio.sleep(1.0)
    after = server.megabytes
    wrong = {s: c for s, c in statuses.items() if s != 0 and not 400 <= s < 500}
    for status in wrong:
        print(f"answered with {status}: {examples[status]!r}".replace("|", "/"))
    print(f"{count} malformed requests: answers by status {dict(statuses)}")
    bar(f"{count} malformed requests, answers but 4xx", "0", str(sum(wrong.values())), not wrong)
    growth = after / before
    bar(f"{count} malformed requests, memory", "<= 1.05", f"{growth:.3f}", growth <= 1.05)
    healthy = (await ask(server.port, request("GET", "/health"))).status == 200
    works = (await ask(server.port, completion())).status == 200
    bar("the server is healthy afterwards", "yes", "yes" if healthy else "no", healthy and works)


async def measure(quick: bool) -> None:
    """Prints all bars."""
    server = ServerProcess()
    try:
        await server.wait()
        seconds = 4.0 if quick else 20.0
        together = await tokens_per_second(server.port, ROWS, seconds)
        alone = await tokens_per_second(server.port, 1, seconds)
        print(f"{together:.0f} tokens/s for {ROWS} clients, {alone:.0f} for one")
        ratio = together / alone
        bar(f"tokens/s, {ROWS} clients / one", ">= 4", f"{ratio:.2f}", ratio >= 4)
        await load(server, QUICK_CLIENTS if quick else CLIENTS, QUICK_SECONDS if quick else SECONDS)
        await fuzz(server, QUICK_MALFORMED if quick else MALFORMED)
    finally:
        server.end()


def main() -> None:
    """Runs the server, or asks one."""
    for argument in sys.argv[1:]:
        if argument.startswith("--serve="):
            serve(int(argument.partition("=")[2]))
            return
    asyncio.run(measure("--quick" in sys.argv))


if __name__ == "__main__":
    main()
