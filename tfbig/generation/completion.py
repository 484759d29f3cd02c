"""One text that is being written: its tokens, and the text they stand for. TensorFlow-free."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tfbig.generation.sampling import SamplingOptions, TokenLogprobs
from tfbig.generation.text_stream import TextStream

FinishReason = Literal["stop", "length", "cancelled"]


class Tokenizer(Protocol):
    """What is needed of data_pipeline.tokenizer.Tokenizer."""

    def decode_bytes(self, ids: Sequence[int]) -> bytes: ...


@dataclass(eq=False)
class Completion:
    """The tokens that follow a prompt.

    Args:
      prompt: at least one token id; completions of one request share the list itself, and its
        passage through the model.
      options: of the sampling.
      max_tokens: to write at most.
      end_tokens: end the text, and are no part of it.
      choice: index among the completions of one request; each has its own draws.
      num_top_logprobs: of the most likely tokens that are reported at each place; -1 reports none.

    Attributes:
      written: token ids so far.
      logprobs: of the tokens written, where they are wanted.
      finish_reason: None while it is being written.
    """

    prompt: list[int]
    options: SamplingOptions
    max_tokens: int
    end_tokens: frozenset[int] = frozenset()
    choice: int = 0
    num_top_logprobs: int = -1
    written: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def finish(self, reason: FinishReason) -> None:
        """Ends the text, unless it has ended; its row is free at the engine's next step."""
        self.finish_reason = self.finish_reason or reason


@dataclass(frozen=True)
class TokenText:
    """A token with its place in the text, for log probabilities."""

    logprobs: TokenLogprobs
    offset: int  # characters of text before it, those of an unfinished character not counted


@dataclass(frozen=True)
class Piece:
    """What is new of a completion."""

    text: str
    tokens: list[TokenText]
    num_tokens: int
    finish_reason: FinishReason | None


class CompletionText:
    """Turns a completion's tokens into text, and ends it at a stop string.

    Args:
      completion: whose text it is.
      tokenizer: of the model.
      stop: strings that end the text and are no part of it.
    """

    def __init__(
        self, completion: Completion, tokenizer: Tokenizer, stop: Sequence[str] = ()
    ) -> None:
        self.completion, self._tokenizer = completion, tokenizer
        self._stream = TextStream(stop)
        self._held: list[TokenText] = []  # whose text is not certain yet
        self._num_read = 0
        self._finished = False

    def take(self) -> Piece:
        """Returns what is certain since the last call; whole characters only."""
        completion, stream = self.completion, self._stream
        text, start = "", self._num_read
        while self._num_read < len(completion.written) and not stream.stopped:
            token = completion.written[self._num_read]
            if completion.num_top_logprobs >= 0:
                found = completion.logprobs[self._num_read]
                self._held.append(TokenText(found, stream.num_characters))
            self._num_read += 1
            text += stream.feed(self._tokenizer.decode_bytes([token]))
        if stream.stopped:
            # A stop string in the last token allowed is a stop all the same.
            completion.finish_reason = "stop"
        if completion.finish_reason is not None and not self._finished:
            self._finished = True
            text += stream.finish()
        certain = [token for token in self._held if token.offset < stream.num_handed]
        self._held = self._held[len(certain) :]
        return Piece(text, certain, self._num_read - start, completion.finish_reason)
