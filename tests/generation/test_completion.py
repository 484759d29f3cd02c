"""Tokens to text: whole characters, stop strings across tokens, places of log probabilities."""

import pytest

from tfbig.generation.completion import Completion, CompletionText
from tfbig.generation.sampling import SamplingOptions, TokenLogprobs


class Pieces:
    """A tokenizer of a few byte strings."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces

    def decode_bytes(self, ids):
        return b"".join(self.pieces[k] for k in ids)


def write(pieces, stop=(), finish="length", logprobs=False):
    """Returns the pieces of text that tokens give one by one."""
    completion = Completion([0], SamplingOptions(), 99, num_top_logprobs=0 if logprobs else -1)
    text = CompletionText(completion, Pieces(*pieces), stop)
    taken = []
    for token in range(len(pieces)):
        completion.written.append(token)
        completion.logprobs.append(TokenLogprobs(token, -1.0, ()))
        if token == len(pieces) - 1:
            completion.finish(finish)
        taken.append(text.take())
        if taken[-1].finish_reason:
            break
    return taken


def test_no_character_is_split():
    taken = write(["é".encode()[:1], "é".encode()[1:] + "𝄞".encode()[:2], "𝄞".encode()[2:], b"!"])
    assert [piece.text for piece in taken] == ["", "é", "𝄞", "!"]
    assert write([b"a", b"\xe2\x82"])[-1].text == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("pieces", "stop", "text"),
    [
        ([b"one E", b"N", b"D two"], ["END"], "one "),
        ([b"one E", b"N", b"d two"], ["END"], "one ENd two"),
        ([b"aab", b"aac"], ["aac"], "aab"),
        ([b"xyz"], ["z", "y"], "x"),
        ([b"ab\xc3", b"\xa9cd"], ["éc"], "ab"),
        ([b"tail E"], ["END"], "tail E"),
    ],
)
def test_stop_strings(pieces, stop, text):
    taken = write(pieces, stop)
    assert "".join(piece.text for piece in taken) == text
    stopped = any(word in b"".join(pieces).decode() for word in stop)
    assert taken[-1].finish_reason == ("stop" if stopped else "length")
    for piece in taken[:-1]:
        assert not any(piece.text.endswith(word[:1]) for word in stop), "handed out too early"


def test_log_probabilities_come_with_their_text():
    taken = write([b"a", b"b E", b"\xc3", b"\xa9N", b"D", b"x"], ["END"], logprobs=True)
    shown = [[(token.logprobs.token, token.offset) for token in piece.tokens] for piece in taken]
    # "b E" is certain as far as its first character; the two halves of é share their place.
    assert shown == [[(0, 0)], [(1, 1)], [], [(2, 4), (3, 4)], [(4, 6)], [(5, 7)]]
    taken = write([b"a", b"E", b"N", b"D"], ["END"], logprobs=True)
    assert [[token.offset for token in piece.tokens] for piece in taken] == [[0], [], [], []]


def test_usage_counts_tokens_of_the_stop_string():
    taken = write([b"a", b"EN", b"D", b"never"], ["END"])
    assert [piece.num_tokens for piece in taken] == [1, 1, 1]
