"""Answers requests over HTTP with a checkpoint: `tfbig serve --run runs/gpt_tiny`."""

import dataclasses
import importlib.util
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

from tfbig.command import launched_rank, run_command
from tfbig.config import ParallelConfig, section_values
from tfbig.errors import UserError
from tfbig.flags import Flags
from tfbig.serve_config import ServeConfig

COMMON_FLAGS = (
    "run checkpoint host port api_key num_rows queue_size request_seconds precision num_threads"
).split()
_NEEDED = ("starlette", "uvicorn", "jinja2", "prometheus_client")


def run(config: ServeConfig, parallel: dict[str, Any]) -> int:
    """Serves until a signal comes and the requests under way are answered; returns 0 then.

    Of a model that is cut over ranks, rank 0 does, and the others compute with it.

    Args:
      config: which model answers, where, within which limits.
      parallel: fields of ParallelConfig that differ from the defaults.

    Raises:
      UserError: there is no such run, a limit makes no sense, or the port is taken.
    """
    check(config)
    from tfbig.serving.ranks import follow
    from tfbig.serving.served_model import load_model

    if launched_rank() > 0:
        model = load_model(config, parallel)
        # A launcher signals all ranks: rank 0 ends these once it has answered what is under way.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        follow(model.trainer)
        return 0
    listener = listen(config.host, config.port)
    model = load_model(config, parallel)
    try:
        model.warm_up(config.num_rows)
        answer(model, config, listener)
    finally:
        listener.close()
        model.trainer.close()
    return 0


def answer(model: Any, config: ServeConfig, listener: socket.socket) -> None:
    """Answers requests until a signal comes.

    Args:
      model: a ServedModel, warmed up.
      config: its limits.
      listener: bound.
    """
    from tfbig.serving.access_log import log
    from tfbig.serving.admission import is_loopback
    from tfbig.serving.app import Server
    from tfbig.serving.http_server import HttpServer

    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host

    def say_so() -> None:
        print(f"serving {model.name} at http://{shown}:{port} (Ctrl-C ends)", flush=True)

    server = HttpServer(Server(model, config).app, config, say_so)
    # uvicorn hands a signal on once it has shut down; by then there is nothing left to end.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.leave)
    if not is_loopback(host) and not config.api_key:
        print(
            "warning: other machines can reach this server, and no --api_key is set.",
            file=sys.stderr,
            flush=True,
        )
    server.run(sockets=[listener])
    log("stop")


def check(config: ServeConfig) -> None:
    """Raises UserError where the server could not start, before TensorFlow is loaded."""
    lacking = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        raise UserError(
            f"serving needs {', '.join(lacking)}: pip install 'tfbig[serve]', or"
            " pip install -e '.[serve]' in a checkout."
        )
    for name in ("num_rows", "max_choices", "max_body_bytes", "max_connections"):
        if getattr(config, name) < 1:
            raise UserError(f"--{name}={getattr(config, name)} must be at least 1.")
    for name in ("queue_size", "max_tokens_limit", "drain_seconds"):
        if getattr(config, name) < 0:
            raise UserError(f"--{name}={getattr(config, name)} must be at least 0.")
    for name in ("request_seconds", "body_seconds"):
        if not getattr(config, name) > 0:
            raise UserError(f"--{name}={getattr(config, name)} must be above 0.")
    if not 0 <= config.port < 1 << 16:
        raise UserError(f"--port={config.port} must be from 0 to 65535.")
    if config.queue_size + config.num_rows < config.max_choices:
        raise UserError(
            f"--max_choices={config.max_choices} texts of one request never fit into"
            f" --num_rows={config.num_rows} and --queue_size={config.queue_size}."
        )


def listen(host: str, port: int) -> socket.socket:
    """Returns a bound socket.

    Raises:
      UserError: the address cannot be had.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise UserError(
            f"cannot listen on --host={host} --port={port}: {error.strerror}."
        ) from None
    listener.set_inheritable(True)
    return listener


def _body(arguments: Sequence[str]) -> int:
    sections = (ServeConfig, ParallelConfig)
    flags = Flags("serve", sections, "answers requests over HTTP.", COMMON_FLAGS)
    given = flags.parse(arguments)
    config = ServeConfig(**section_values(ServeConfig, given))
    if not config.api_key:
        # A key on the command line is seen by everyone on the machine.
        config = dataclasses.replace(config, api_key=os.environ.get("TFBIG_API_KEY", ""))
    return run(config, section_values(ParallelConfig, given))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits."""
    run_command("serve", _body, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    main()
