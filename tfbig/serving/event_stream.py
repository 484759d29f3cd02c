"""Server-sent events: sent as they are made, given up when the client leaves."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send


class EventStream(Response):
    """Sends what a generator of bytes yields.

    Args:
      events: each whole, as `data: ...` with an empty line behind it. It is closed in any case.
      headers: further ones.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> None:
        super().__init__(
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers}
        )
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left = asyncio.create_task(_until_disconnect(receive))
        following: asyncio.Task[bytes] | None = None
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            while True:
                following = asyncio.create_task(_next(self._events))
                await asyncio.wait({following, left}, return_when=asyncio.FIRST_COMPLETED)
                if not following.done():
                    return
                data = following.result()
                await send({"type": "http.response.body", "body": data, "more_body": bool(data)})
                if not data:
                    return
        except OSError:  # the client left while we sent
            return
        finally:
            left.cancel()
            if following is not None and not following.done():
                following.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await following
            await self._events.aclose()


async def _next(events: AsyncGenerator[bytes, None]) -> bytes:
    """Returns the next event, b"" at the end."""
    return await anext(events, b"")


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
