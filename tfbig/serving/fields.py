"""Reading one field of a request's JSON, with an error that names it."""

import math
import reprlib
from collections.abc import Mapping
from typing import Any

from tfbig.serving.errors import RequestError


def shown(value: Any) -> str:
    """Returns a value for a message, cut short, however long or deep it is."""
    text = reprlib.repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


class Fields:
    """The fields of a JSON object; null is as good as absent.

    Args:
      body: the object.
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body

    def get(self, name: str) -> Any:
        """Returns a field as it is, None where it is absent."""
        return self._body.get(name)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """Returns a number from low to high.

        Raises:
          RequestError: it is none.
        """
        value = self._body.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise RequestError(f"{name} must be a number, not {shown(value)}.", parameter=name)
        # Compared before it becomes a float, which a huge integer cannot.
        if not low <= value <= high or not math.isfinite(value):
            raise RequestError(
                f"{name} must be from {low:g} to {high:g}, not {shown(value)}.", parameter=name
            )
        return float(value)

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        """Returns an integer from low to high.

        Raises:
          RequestError: it is none.
        """
        value = self._body.get(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise RequestError(f"{name} must be an integer, not {shown(value)}.", parameter=name)
        if not low <= value <= high:
            raise RequestError(
                f"{name} must be from {low} to {high}, not {shown(value)}.", parameter=name
            )
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Returns true or false.

        Raises:
          RequestError: it is neither.
        """
        value = self._body.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise RequestError(f"{name} must be true or false, not {shown(value)}.", parameter=name)
        return value

    def text(self, name: str, default: str = "") -> str:
        """Returns a string that is valid Unicode.

        Raises:
          RequestError: it is none.
        """
        value = self._body.get(name)
        return default if value is None else checked_text(name, value)

    def refuse(self, name: str, harmless: tuple[Any, ...], reason: str) -> None:
        """Raises RequestError when a field that we lack is used."""
        value = self._body.get(name)
        if value is not None and value not in harmless:
            raise RequestError(f"{name} is not supported: {reason}.", parameter=name)


def checked_text(name: str, value: Any) -> str:
    """Returns a value that must be a string.

    Raises:
      RequestError: it is none, or holds half a surrogate pair.
    """
    if not isinstance(value, str):
        raise RequestError(f"{name} must be a string, not {shown(value)}.", parameter=name)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RequestError(
            f"{name} is not valid Unicode: it has a lone surrogate.", parameter=name
        ) from None
    return value
