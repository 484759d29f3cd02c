"""Server-sent events: sent as they are made, given up when the client leaves or does not read."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

# What the last event, which says that time is up, may take to be sent.
_LAST_SECONDS = 1.0


class EventStream(Response):
    """Sends what a generator of bytes yields.

    Args:
      events: each whole, as `data: ...` with an empty line behind it. It is closed in any case.
      on_end: is called at the end in any case; `events` may never have begun.
      headers: further ones.
      deadline: of time.monotonic(); who has not read what was sent by then is dropped.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        on_end: Callable[[], None],
        headers: Mapping[str, str],
        deadline: float,
    ) -> None:
        super().__init__(
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers}
        )
        del self.headers["content-length"]
        self._events, self._on_end, self._deadline = events, on_end, deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # One task for all events: starting one for each would cost more than making it.
        sending = asyncio.create_task(self._send_all(send))
        left = asyncio.create_task(_until_disconnect(receive))
        seconds = max(self._deadline - time.monotonic(), 0.0) + _LAST_SECONDS
        try:
            await asyncio.wait({sending, left}, timeout=seconds, return_when="FIRST_COMPLETED")
            if sending.done():
                with contextlib.suppress(OSError):  # the client left while we sent
                    sending.result()
            elif not left.done() and "abort" in scope.get("state", {}):
                scope["state"]["abort"]()
        finally:
            for task in (sending, left):
                task.cancel()
            try:
                await asyncio.wait({sending, left})
                await self._events.aclose()
            finally:
                self._on_end()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        async for data in self._events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
