"""Arrays in .json files, element by element: nobody holds all of one, and it is cut between two."""

import re
from collections.abc import Iterator
from typing import Any

from data_pipeline.documents import BadRecord, parse_json
from tfbig.errors import UserError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_WHITE_SPACE = b" \t\r\n"  # of JSON
_STRUCTURE = re.compile(rb"[\[{\]},]")


class _CommaFinder:
    """Finds the commas between an array's elements, in bytes that come in chunks.

    Args:
      depth: how many brackets are open before the first byte.

    Attributes:
      is_closed: whether neither a bracket nor a string is open behind the last chunk.
    """

    def __init__(self, depth: int) -> None:
        self._depth, self._in_string, self._is_escaped = depth, 0, False

    @property
    def is_closed(self) -> bool:
        return self._depth <= 0 and not self._in_string

    def find(self, chunk: bytes) -> list[int]:
        """Returns the places behind those commas; the chunk is not empty."""
        # Pairs of backslashes and escaped quotes are covered: all quotes that are left begin or
        # end a string. What the last chunk's backslash escapes is this one's first byte.
        plain = b"_" + chunk[1:] if self._is_escaped else chunk
        plain = plain.replace(rb"\\", b"__").replace(rb"\"", b"__")
        self._is_escaped = plain.endswith(b"\\")
        found: list[int] = []
        start = 0
        stretches = plain.split(b'"')  # by turns outside of strings and, nearly all bytes, in them
        for number, stretch in enumerate(stretches, self._in_string):
            if number % 2 == 0:
                for match in _STRUCTURE.finditer(stretch):
                    if match[0] == b",":
                        if self._depth == 1:
                            found.append(start + match.end())
                    else:
                        self._depth += 1 if match[0] in b"[{" else -1
            start += len(stretch) + 1
        self._in_string = (self._in_string + len(stretches) - 1) % 2
        return found


def begins_an_array(chunks: Iterator[bytes]) -> bool:
    """Returns whether a .json file is one array of records, not a record a line."""
    return is_array(beginning(chunks))


def beginning(chunks: Iterator[bytes]) -> bytes:
    """Returns the first bytes up to the first chunk with anything but white space in it."""
    start = b""
    for chunk in chunks:
        start += chunk
        if start.removeprefix(BYTE_ORDER_MARK).strip():
            break
    return start


def is_array(start: bytes) -> bool:
    """Returns whether a file of that `beginning` is one array."""
    return start.removeprefix(BYTE_ORDER_MARK).lstrip()[:1] == b"["


def array_units(
    chunks: Iterator[bytes], name: str, in_array: bool = False, is_part: bool = False
) -> Iterator[tuple[bytes, bool]]:
    """Yields an array's bytes cut behind each element's comma, and which of them are the last.

    Of text that is no JSON something is yielded, too: of a JSON array, and of nothing else, all
    elements are JSON.

    Args:
      chunks: of the file or a part of it.
      name: of the file, for messages.
      in_array: whether they begin behind a comma of it, not at the file's beginning.
      is_part: whether they may end behind one.

    Raises:
      UserError: the end is missing.
    """
    commas = _CommaFinder(int(in_array))
    pieces: list[bytes] = []  # of an element that spans chunks
    for chunk in filter(None, chunks):
        start = 0
        for end in commas.find(chunk):
            yield b"".join([*pieces, chunk[start:end]]), False
            pieces, start = [], end
        pieces.append(chunk[start:])
    last = b"".join(pieces)
    if (last or not is_part) and not commas.is_closed:
        raise UserError(f"{name} is cut short: its array has no end. Get the file again.")
    if last:
        yield last, True


def array_records(
    chunks: Iterator[bytes], name: str, first_record: int, in_array: bool, is_part: bool
) -> Iterator[tuple[str, Any]]:
    """Yields (place, parsed record) of each element of an array, or of a part of one.

    Args:
      chunks: as of `array_units`.
      name: of the file.
      first_record: number of the first element.
      in_array: as of `array_units`.
      is_part: as of `array_units`.

    Raises:
      UserError: it is no JSON array: what a record behind the error is cannot be known.
    """
    units = array_units(chunks, name, in_array, is_part)
    for number, (data, is_last) in enumerate(units, first_record):
        is_first = number == first_record and not in_array
        try:
            element = _element(data, is_first, is_last)
            if is_first and is_last and not element.strip(_WHITE_SPACE):
                return  # an array of nothing
            yield f"record {number}", parse_json(element)
        except BadRecord as problem:
            raise UserError(f"{name} record {number} {problem}") from None


def _element(data: bytes, is_first: bool, is_last: bool) -> bytes:
    """Returns one of `array_units` without what stands around the element."""
    start, end = 0, len(data) - 1
    if is_last:
        closed = data.rstrip(_WHITE_SPACE)
        end = len(closed) - 1
        if not closed.endswith(b"]"):
            raise BadRecord("is not valid JSON", ": there is something behind the array's end")
    if is_first:
        opened = data.removeprefix(BYTE_ORDER_MARK).lstrip(_WHITE_SPACE)
        start = len(data) - len(opened) + 1
        if not opened.startswith(b"["):
            raise BadRecord("is not valid JSON", ": there is something before the array")
    return data[start:end]
