"""Who may ask: by key, by the name they call the server, and by how many ask already."""

import hmac
import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.requests import Request

from tfbig.serving.errors import RequestError


def is_loopback(host: str) -> bool:
    """Returns whether a host's name or address is this machine's to itself.

    >>> is_loopback("localhost"), is_loopback("127.0.0.1"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    if host == "localhost" or host.endswith(".localhost"):  # RFC 6761, section 6.3
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_key(request: Request, key: str) -> None:
    """Raises RequestError unless the request has the key, compared in constant time."""
    if not key:
        return
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    # Header bytes reach us as latin-1.
    same = hmac.compare_digest(given.strip().encode("latin-1"), key.encode())
    if kind.lower() != "bearer" or not same:
        raise RequestError(
            "the API key is missing or wrong: send it as `Authorization: Bearer KEY`.",
            401,
            "authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def check_host(request: Request, own: str, allowed: Collection[str]) -> None:
    """Raises RequestError when a server for this machine alone is called by another's name.

    A page whose name its owner lets stand for 127.0.0.1 would otherwise be of the same site as this
    server, and could ask in a browser's name and read the answers.

    Args:
      request: whose Host is looked at.
      own: address that the server listens on.
      allowed: names that it has besides, e.g. in front of a proxy on this machine.
    """
    given = request.headers.get("host", "")
    if not given or not is_loopback(own):
        return
    try:
        name = urlsplit(f"//{given}").hostname or ""
    except ValueError:
        name = ""
    if not is_loopback(name) and name not in allowed:
        raise RequestError(
            f"this server is not called {given[:80]!r}: --allowed_hosts gives it further names.",
            403,
        )


def check_crowd(request: Request) -> None:
    """Raises RequestError when there are more connections than --max_connections."""
    count = getattr(request.state, "too_many", None)
    if count is not None:
        raise RequestError(
            f"{count} connections are open: try again in 1 s.",
            429,
            "rate_limit_error",
            code="too_many_connections",
            headers={"Retry-After": "1", "Connection": "close"},
        )
