"""Many documents to token ids, by the fastest backend whose ids are the tokenizers library's.

gigatoken and tiktoken encode byte-level BPE many times faster than the library. Neither is trusted:
a sample of every input is encoded both ways, and a backend that differs is dropped, aloud.
"""

import json
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from data_pipeline.tokenizer import GPT2_PATTERN, Tokenizer
from tfbig.errors import UserError

BACKENDS = ("gigatoken", "tiktoken", "tokenizers")  # fastest first
# Text of an input on which a backend must agree with the library: so much at most, all of it until
# so much is compared, and later a share, for the library would take longer than everything else.
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
    """

    def __init__(self, tokenizer: Tokenizer, wanted: str = "auto") -> None:
        self._tokenizer = tokenizer
        self._makers = {
            "gigatoken": _gigatoken_backend,
            "tiktoken": _tiktoken_backend,
            "tokenizers": _library_backend,
        }
        self._num_compared = 0  # characters
        self._candidates = list(BACKENDS) if wanted == "auto" else [wanted]
        self._use_next(wanted != "auto")

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
            self._candidates = [*self._candidates, "tokenizers"]
            self._use_next(False)
            said = f"{dropped}'s ids differ from the tokenizers library's: {self.name} is used"
        return said

    def _use_next(self, by_name: bool) -> None:
        """Takes the next backend that can be had."""
        while True:
            name = self._candidates.pop(0)
            try:
                self._backend: _Backend = self._makers[name](self._tokenizer)
            except (ImportError, UserError) as error:
                if by_name or not self._candidates:
                    raise UserError(f"--encoder={name} cannot be used: {error}") from None
                continue
            self.name = name
            return


def _check_fits(tokenizer: Tokenizer) -> None:
    if not tokenizer.is_gpt2_like:
        raise UserError(
            "it encodes byte-level BPE with GPT-2's pre-tokenizer, merges in the order of ids and "
            "no added tokens but special ones; this tokenizer.json is otherwise"
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

    return _by_segments(encode_segments, cut=True)


def _library_backend(tokenizer: Tokenizer) -> _Backend:
    def encode_segments(texts: list[str], num_threads: int) -> list[Any]:
        found = tokenizer.library.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in found]

    return _by_segments(encode_segments, cut=tokenizer.is_gpt2_like)


def _by_segments(encode_segments: Any, cut: bool) -> _Backend:
    def encode(texts: Sequence[str], num_threads: int, data: Sequence[bytes] | None) -> Encoded:
        segments, counts = [], []
        for text in texts:
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
