"""uvicorn with our settings, which says that it serves when it does."""

import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from tfbig.serve_config import ServeConfig
from tfbig.serving.connection import ConnectionConfig

_KEEP_ALIVE_SECONDS = 30


class HttpServer(uvicorn.Server):
    """Listens for an application.

    Args:
      app: that answers.
      config: limits.
      on_start: is called once clients can connect.
    """

    def __init__(
        self, app: Any, config: ServeConfig, on_start: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(
            ConnectionConfig(
                app,
                config.max_connections,
                config.body_seconds,
                timeout_graceful_shutdown=round(config.drain_seconds),
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            )
        )
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens, and says so."""
        await super().startup(sockets)
        self._on_start()

    def leave(self, number: int, frame: FrameType | None) -> None:
        """Takes a signal that comes before uvicorn takes them, or after."""
        self.should_exit = True
