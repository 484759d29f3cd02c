"""One client's connection: what it may hold open, and for how long.

uvicorn bounds neither how long a request's head may take, nor how many connections there are, nor
how long an answer may lie unread; and it refuses what is no HTTP in plain text.
"""

import asyncio
import logging
from typing import Any

import h11
import orjson
import uvicorn
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from tfbig.serving.access_log import log
from tfbig.serving.errors import RequestError

# Beyond this many times the limit there is not even an answer that says so.
_REFUSED_FACTOR = 2


class ConnectionConfig(uvicorn.Config):
    """uvicorn's settings, and what a connection may take.

    Args:
      app: that answers.
      max_connections: whose requests are answered; those of others get 429.
      head_seconds: in which a request's head must have arrived, and an answer been read once it is
        whole.
      settings: uvicorn's own.
    """

    def __init__(
        self, app: Any, max_connections: int, head_seconds: float, **settings: Any
    ) -> None:
        self.max_connections, self.head_seconds = max_connections, head_seconds
        super().__init__(
            app,
            http=Connection,
            lifespan="on",
            log_level="warning",
            log_config=None,
            access_log=False,
            server_header=False,
            **settings,
        )
        logger = logging.getLogger("uvicorn")
        logger.handlers, logger.propagate = [_Log()], False


class _Log(logging.Handler):
    """Writes uvicorn's own messages as lines like all others."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a message, but for that of a request which `Connection` refuses."""
        if record.msg != "Invalid HTTP request received.":
            log("server", level=record.levelname.lower(), message=record.getMessage())


class Connection(H11Protocol):
    """A connection of a server with a ConnectionConfig.

    A request's `state` has what the application needs: `too_many`, how many connections there are
    where that is too many, and `abort`, which drops the connection with all that is not sent.
    """

    config: ConnectionConfig

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the clock of the first request's head."""
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = None
        count, most = len(self.connections), self.config.max_connections
        if count > _REFUSED_FACTOR * most:
            transport.abort()
            return
        self.app_state = {
            **self.app_state,
            "abort": transport.abort,
            "too_many": count if count > most else None,
        }
        self._start(self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the clock."""
        self._stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Starts the clock with a head's first byte, and stops it with its last."""
        super().data_received(data)
        if self.transport.is_closing():  # another clock runs
            return
        if self.conn.their_state is not h11.IDLE:
            self._stop()
        elif self._timer is None:
            self._start(self._head_is_late)

    def on_response_complete(self) -> None:
        """Gives the client time to read what it was sent before the connection is dropped."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._start(self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        """Closes a connection that has nothing to say, or does not listen."""
        super().timeout_keep_alive_handler()
        self._start(self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """Refuses what is no HTTP, as everything else is refused."""
        self._refuse(RequestError(f"this is no HTTP request: {msg}"))

    def _head_is_late(self) -> None:
        if self.transport.is_closing():
            return
        if not self.conn.trailing_data[0]:  # it said nothing at all
            self.transport.close()
            return
        seconds = self.config.head_seconds
        message = f"the request's head did not arrive within {seconds:g} s."
        self._refuse(RequestError(message, 408, "timeout_error"))

    def _refuse(self, error: RequestError) -> None:
        """Answers without the application, and closes."""
        log("refused", status=error.status, error=error.message)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = orjson.dumps(error.body())
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"connection", b"close"),
            ]
            reason = STATUS_PHRASES[error.status]
            head = h11.Response(status_code=error.status, headers=headers, reason=reason)
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
        self._start(self.transport.abort)

    def _start(self, late: Any) -> None:
        self._stop()
        self._timer = self.loop.call_later(self.config.head_seconds, late)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
