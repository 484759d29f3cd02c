"""Many documents to token ids, by the fastest backend whose ids are the tokenizers library's.

gigatoken and tiktoken encode byte-level BPE many times faster than the library. Neither is trusted:
a sample of every input is encoded both ways, and a backend that differs is dropped, aloud.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from data_pipeline.tokenizer import GPT2_PATTERN, Tokenizer
from tfbig.errors import UserError

BACKENDS = ("gigatoken", "tiktoken", "tokenizers")  # fastest first
_INSTALL = {
    "gigatoken": " (python -m pip install 'tfbig[gigatoken]')",
    "tiktoken": " (python -m pip install tiktoken)",
}
# Text of an input on which a backend must agree with the library: so much at most, all of it until
# so much of the chunk is compared, and then a share: the library would take longer than all else.
_GATE_CHARACTERS = 1 << 16
_GATE_SHARE, _GATE_LEAST = 64, 256
# A document is cut into pieces of about this many characters, encoded apart and joined. Memory and
# time of one huge document are those of its pieces.
SEGMENT_CHARACTERS = 1 << 20

Encoded = tuple[np.ndarray, np.ndarray]  # ids (n,), lengths of the texts (m,)


class _Backend(Protocol):
    def __call__(
        self, texts: Sequence[str], num_threads: int, data: Sequence[bytes] | None
    ) -> Encoded: ...


class TokenEncoder:
    """Encodes batches of texts.

    Args:
      tokenizer: whose ids are given.
      wanted: one of BACKENDS, or "auto" for the fastest that is installed and fits.

    Raises:
      UserError: a backend was asked for by name and is not installed or does not fit.

    Attributes:
      name: of the backend in use.
      notes: why faster ones are not.
    """

    def __init__(self, tokenizer: Tokenizer, wanted: str = "auto") -> None:
        self._tokenizer = tokenizer
        self._makers = {
            "gigatoken": _gigatoken_backend,
            "tiktoken": _tiktoken_backend,
            "tokenizers": _library_backend,
        }
        # The library, which all are compared with, takes the place of one that is dropped.
        self._candidates = BACKENDS if wanted == "auto" else (wanted, "tokenizers")
        self._made: dict[str, _Backend | None] = {}  # None cannot be had
        self.notes: list[str] = []
        self._use_from(0, may_fail=wanted == "auto")
        self._first = self._place
        self.begin()

    def begin(self) -> None:
        """Begins a chunk: what was compared and dropped in others counts no more.

        So a chunk's ids are a function of what is in it, whichever process takes it after which.
        """
        self._num_compared = 0  # characters
        self._use_from(self._first)

    def encode(
        self, texts: Sequence[str], num_threads: int = 1, data: Sequence[bytes] | None = None
    ) -> Encoded:
        """Returns the ids of all texts in a row, (n,) of the tokenizer's dtype, and their lengths.

        Args:
          texts: documents.
          num_threads: that encode at the same time.
          data: the same in UTF-8, where it is at hand.
        """
        ids, lengths = self._backend(texts, num_threads, data)
        return ids.astype(self._tokenizer.dtype, copy=False), lengths

    def check(self, texts: Sequence[str]) -> str:
        """Compares ids with the library's on the beginning of `texts`.

        Returns:
          "" when they agree; else which backend was dropped, and for which.
        """
        share = max(_GATE_LEAST, sum(map(len, texts)) // _GATE_SHARE)
        room = min(_GATE_CHARACTERS, max(share, _GATE_CHARACTERS - self._num_compared))
        sample = []
        for text in texts:
            if room <= 0:
                break
            sample.append(text[:room])
            room -= len(text)
        self._num_compared += sum(map(len, sample))
        said = ""
        while self.name != "tokenizers" and sample:
            ids, lengths = self.encode(sample)
            expected = [self._tokenizer.encode(text) for text in sample]
            same = [len(part) for part in expected] == lengths.tolist()
            if same and np.array_equal(ids, np.concatenate(expected)):
                break
            dropped = self.name
            self._use_from(self._place + 1)
            said = f"{dropped}'s ids differ from the tokenizers library's: {self.name} is used"
        return said

    def _use_from(self, place: int, may_fail: bool = True) -> None:
        """Takes the first backend that can be had from a place among the candidates on."""
        for number, name in enumerate(self._candidates[place:], place):
            if name not in self._made:
                self._made[name] = self._make(name, may_fail)
            if (found := self._made[name]) is not None:
                self._backend, self.name, self._place = found, name, number
                return
        raise AssertionError("the tokenizers library itself cannot fail")

    def _make(self, name: str, may_fail: bool) -> _Backend | None:
        """Returns a backend; None, noted, where it cannot be had."""
        try:
            return self._makers[name](self._tokenizer)
        except (ImportError, UserError) as error:
            if not may_fail:
                raise UserError(f"--encoder={name} cannot be used: {error}") from None
            hint = _INSTALL.get(name, "") if isinstance(error, ImportError) else ""
            self.notes.append(f"a slower encoder takes {name}'s place: {error}{hint}")
            return None


def _check_fits(tokenizer: Tokenizer) -> None:
    if not tokenizer.is_gpt2_like:
        raise UserError(
            "it encodes byte-level BPE with GPT-2's pre-tokenizer, merges in the order of ids, no "
            "normalizer but NFC, and added tokens that share no character with special ones; this "
            "tokenizer.json is otherwise"
        )


def _gigatoken_backend(tokenizer: Tokenizer) -> _Backend:
    import gigatoken

    # Without special tokens their names in a text are text.
    added = tokenizer.description.get("added_tokens", [])
    kept = [token for token in added if not token["special"]]
    description = {**tokenizer.description, "added_tokens": kept, "post_processor": None}
    try:
        core = gigatoken.Tokenizer.from_json(json.dumps(description))
    except Exception as error:  # of its own; what it loads and yet reads otherwise, `check` finds
        raise UserError(f"gigatoken does not read this tokenizer.json: {error}") from None

    def encode(texts: Sequence[str], num_threads: int, data: Sequence[bytes] | None) -> Encoded:
        # A third faster from bytes than from strings.
        found = [text.encode() for text in texts] if data is None else list(data)
        layout = core.encode_batch(found, parallel=num_threads > 1).layout
        offsets = np.asarray(layout.offsets.data)
        return np.asarray(layout.content.data)[offsets[0] : offsets[-1]], np.diff(offsets)

    return encode


def _tiktoken_backend(tokenizer: Tokenizer) -> _Backend:
    _check_fits(tokenizer)
    import tiktoken

    core = tiktoken.Encoding(
        tokenizer.sha256,
        pat_str=GPT2_PATTERN,
        mergeable_ranks=tokenizer.mergeable_ranks(),
        special_tokens={},
    )

    def encode_segments(texts: list[str], num_threads: int) -> list[Any]:
        if num_threads == 1:  # without a pool of one thread
            return list(map(core.encode_ordinary, texts))
        return core.encode_ordinary_batch(texts, num_threads=num_threads)

    if tokenizer.matched_tokens:
        encode_segments = _with_matches(encode_segments, tokenizer.matched_tokens)
    return _by_segments(
        encode_segments, cut=True, change=composer(tokenizer) if tokenizer.composes else None
    )


def _with_matches(encode_segments: Any, tokens: Mapping[str, int]) -> Any:
    """Returns an encoder of texts in which added tokens are matched first.

    As the library matches them: from the left, the longest of those that begin at one place, and
    the text between them is encoded piece by piece. GPT-NeoX's are runs of spaces.
    """
    longest_first = sorted(tokens, key=len, reverse=True)
    pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def encode(texts: list[str], num_threads: int) -> list[Any]:
        parts = [pattern.split(text) for text in texts]  # text, token, text, ..., text
        between = encode_segments([text for part in parts for text in part[::2]], num_threads)
        rest = iter(between)
        found = []
        for part in parts:
            ids = list(next(rest))
            for token in part[1::2]:
                ids.append(tokens[token])
                ids += next(rest)
            found.append(ids)
        return found

    return encode


def _library_backend(tokenizer: Tokenizer) -> _Backend:
    def encode_segments(texts: list[str], num_threads: int) -> list[Any]:
        found = tokenizer.library.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in found]

    return _by_segments(encode_segments, cut=tokenizer.is_gpt2_like)


def composer(tokenizer: Tokenizer) -> Callable[[str], str]:
    """Returns what composes text (NFC) as the library does, whose Unicode is older than Python's.

    What is composed in a later version of Unicode is so in each before, where characters that it
    does not know stay as they are. Most text is, and the library takes longer than all else.
    """

    def compose(text: str) -> str:
        if unicodedata.is_normalized("NFC", text):
            return text
        return tokenizer.library.normalizer.normalize_str(text)

    return compose


def _by_segments(
    encode_segments: Any, cut: bool, change: Callable[[str], str] | None = None
) -> _Backend:
    def encode(texts: Sequence[str], num_threads: int, data: Sequence[bytes] | None) -> Encoded:
        segments, counts = [], []
        for text in texts:
            if change is not None:
                text = change(text)
            parts = split_long(text) if cut else [text]
            segments += parts
            counts.append(len(parts))
        lists = encode_segments(segments, num_threads)
        found = [np.fromiter(ids, np.int32, len(ids)) for ids in lists]
        sizes = np.array([len(ids) for ids in found], np.int64)
        starts = np.cumsum([0, *counts])
        totals = np.concatenate([[0], np.cumsum(sizes)])
        ids = np.concatenate(found) if found else np.empty(0, np.int32)
        return ids, np.diff(totals[starts])

    return encode


def split_long(text: str) -> list[str]:
    """Cuts a long text where GPT-2's pre-tokenizer begins a new piece whatever stands around.

    That is before a space or newline behind anything that is no whitespace: no alternative of its
    pattern goes on over such a place, and none looks back. Text without any is left whole.

    >>> "".join(split_long("some text " * 3)) == "some text " * 3
    True
    """
    if len(text) <= SEGMENT_CHARACTERS:
        return [text]
    parts, start = [], 0
    while len(text) - start > SEGMENT_CHARACTERS:
        place = _safe_place(text, start + SEGMENT_CHARACTERS)
        if place < 0:
            break
        parts.append(text[start:place])
        start = place
    return [*parts, text[start:]]


def _safe_place(text: str, at: int) -> int:
    """Returns the first safe place from `at` on, -1 when there is none."""
    while True:
        places = [place for place in (text.find(" ", at), text.find("\n", at)) if place >= 0]
        if not places:
            return -1
        at = min(places)
        if not text[at - 1].isspace():
            return at
        at += 1
