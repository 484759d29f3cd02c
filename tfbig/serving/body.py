"""Reading a request's body, within limits, and noticing that the client has left."""

import asyncio
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.requests import Request

from tfbig.serving.errors import RequestError

# The deepest field that is understood lies at four; what writes JSON, compares values or shows them
# calls itself at each level, and some of it gives up at 254.
_MOST_LEVELS = 32


async def read_json(request: Request, max_bytes: int, seconds: float) -> Mapping[str, Any]:
    """Returns the JSON object that a request carries.

    Args:
      request: whose body is not read yet.
      max_bytes: of the body.
      seconds: in which it must arrive.

    Raises:
      RequestError: too large, too slow, or no JSON object.
      starlette.requests.ClientDisconnect: the client left.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # A page of another site may send text, forms and bodies of no type to a server on this machine,
    # but no JSON.
    if kind != "application/json" and not kind.endswith("+json"):
        raise RequestError(f"Content-Type must be application/json, not {kind[:80]!r}.", 415)
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    try:
        data = await asyncio.wait_for(_read(request, max_bytes), seconds)
    except asyncio.TimeoutError:
        raise RequestError(
            f"the body did not arrive within {seconds:g} s.", 408, "timeout_error"
        ) from None
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}.") from None
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object.")
    _check_levels(body)
    return body


def _check_levels(body: dict[str, Any]) -> None:
    """Raises RequestError when lists and objects lie too deep within each other."""
    level: list[Any] = [body]
    for _ in range(_MOST_LEVELS):
        inner = [value.values() if isinstance(value, dict) else value for value in level]
        level = [value for values in inner for value in values if isinstance(value, (dict, list))]
        if not level:
            return
    raise RequestError(f"the body has more than {_MOST_LEVELS} levels of lists and objects.")


async def _read(request: Request, max_bytes: int) -> bytes:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(data)


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(
        f"the body is larger than {max_bytes} bytes.", 413, headers={"Connection": "close"}
    )


async def disconnected(request: Request) -> None:
    """Returns when the client has left; the body must have been read."""
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return
