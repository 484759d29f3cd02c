"""Tokens to text piece by piece: whole UTF-8 characters, and nothing of a stop string."""

import codecs
from collections.abc import Sequence


class TextStream:
    """Turns the bytes of tokens into text that can be printed at once.

    Args:
      stop: strings that end the text; none of their characters is handed out.

    Attributes:
      stopped: whether a stop string has come.
      num_handed: characters that were handed out.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = [text for text in stop if text]
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held, self.num_handed = "", 0
        self.stopped = False

    @property
    def num_characters(self) -> int:
        """Characters that have come, those that are held back included."""
        return self.num_handed + len(self._held)

    def feed(self, token_bytes: bytes) -> str:
        """Returns the text that is certain after one more token.

        >>> stream = TextStream(stop=["END"])
        >>> stream.feed(b"a E"), stream.feed(b"ND b")
        ('a ', '')
        """
        if self.stopped:
            return ""
        self._held += self._decoder.decode(token_bytes)
        places = [place for text in self._stop if (place := self._held.find(text)) >= 0]
        if places:
            self.stopped = True
            return self._hand_out(min(places), drop_rest=True)
        return self._hand_out(len(self._held) - self._possible_stop_length())

    def finish(self) -> str:
        """Returns what was still held back, at the end of the text."""
        if self.stopped:
            return ""
        self._held += self._decoder.decode(b"", final=True)
        return self._hand_out(len(self._held))

    def _possible_stop_length(self) -> int:
        """Returns the length of the longest ending that could grow into a stop string."""
        longest = max((len(text) for text in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(text.startswith(self._held[-length:]) for text in self._stop):
                return length
        return 0

    def _hand_out(self, length: int, drop_rest: bool = False) -> str:
        text, self._held = self._held[:length], "" if drop_rest else self._held[length:]
        self.num_handed += len(text)
        return text
