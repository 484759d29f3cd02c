"""Structured logs: one JSON object a line on standard error."""

import datetime
import re
import sys
import uuid
from typing import Any

import orjson

_ID = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")


def request_id(given: str | None) -> str:
    """Returns the client's own request id where it is a plain one, else a new one."""
    return given if given and _ID.match(given) else uuid.uuid4().hex


def log(event: str, **fields: Any) -> None:
    """Writes a line; fields that are None are left out."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
    entry: dict[str, Any] = {"time": now, "event": event}
    entry |= {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in fields.items()
        if value is not None
    }
    sys.stderr.write(orjson.dumps(entry, default=str).decode() + "\n")
    sys.stderr.flush()
