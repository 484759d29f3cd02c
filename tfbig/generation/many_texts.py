"""Texts for several prompts, several for each, with what is known of them. TensorFlow-free."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tfbig.errors import UserError
from tfbig.generation.beam_search import BeamOptions, beam_search
from tfbig.generation.completion import Completion, CompletionText, TokenText
from tfbig.generation.engine import Engine
from tfbig.generation.sampling import SamplingOptions
from tfbig.generation.text_stream import TextStream

_MOST_ROWS = 8  # texts that are written at a time


class Tokenizer(Protocol):
    """What is needed of data_pipeline.tokenizer.Tokenizer."""

    end_of_text_id: int

    def encode(self, text: str) -> Any: ...

    def decode_bytes(self, ids: Sequence[int]) -> bytes: ...


@dataclass(frozen=True)
class WrittenText:
    """A text that follows a prompt.

    Attributes:
      finish_reason: "stop" where it came to its end, "length" where it was cut off.
      tokens: with log probabilities, where they were wanted.
      score: of a beam search.
    """

    prompt: str
    text: str
    finish_reason: str
    tokens: tuple[TokenText, ...] | None = None
    score: float | None = None

    def to_json(self, tokenizer: Tokenizer) -> str:
        """Returns a line of JSON."""
        fields: dict[str, Any] = {"prompt": self.prompt, "text": self.text}
        fields["finish_reason"] = self.finish_reason
        if self.score is not None:
            fields["score"] = self.score
        if self.tokens is not None:
            fields["logprobs"] = [
                {
                    "token": token.logprobs.token,
                    "text": _text(tokenizer, token.logprobs.token),
                    "logprob": token.logprobs.logprob,
                    "top": {_text(tokenizer, other): value for other, value in token.logprobs.top},
                }
                for token in self.tokens
            ]
        return json.dumps(fields, ensure_ascii=False)


@dataclass(frozen=True)
class TextWriter:
    """Writes texts with a model; every rank must call it alike.

    Attributes:
      trainer: built, with weights in it.
      tokenizer: of the model.
      max_length: positions of the model.
      max_tokens: to write at most.
      stop: strings that end a text, and are no part of it.
    """

    trainer: Any
    tokenizer: Tokenizer
    max_length: int
    max_tokens: int
    stop: tuple[str, ...] = ()

    def sampled(
        self, prompts: Sequence[str], num_texts: int, options: SamplingOptions, num_logprobs: int
    ) -> Iterator[WrittenText]:
        """Yields `num_texts` texts for each prompt, in the order of the prompts.

        Args:
          prompts: texts.
          num_texts: for each; the first is what it would be alone.
          options: of the sampling.
          num_logprobs: of the likeliest tokens at each place; -1 reports none.

        Raises:
          UserError: a text could become longer than the model's positions.
        """
        texts: list[tuple[str, CompletionText]] = []
        for prompt in prompts:
            ids = self.ids(prompt)
            if len(ids) + self.max_tokens - 1 > self.max_length:  # the last token is never fed
                raise UserError(
                    f"a prompt of {len(ids)} tokens and --max_tokens={self.max_tokens} are more"
                    f" than the model's {self.max_length} positions: give at most"
                    f" {self.max_length - len(ids) + 1} with this prompt."
                )
            end_tokens = frozenset({self.tokenizer.end_of_text_id})
            for index in range(num_texts):
                completion = Completion(
                    ids, options, self.max_tokens, end_tokens, index, num_logprobs
                )
                texts.append((prompt, CompletionText(completion, self.tokenizer, self.stop)))
        yield from self._write(texts)

    def searched(
        self, prompts: Sequence[str], num_texts: int, options: BeamOptions
    ) -> Iterator[WrittenText]:
        """Yields the `num_texts` likeliest texts for each prompt, in the order of the prompts.

        Raises:
          UserError: a text could become longer than the model's positions.
        """
        end_tokens = frozenset({self.tokenizer.end_of_text_id})
        for prompt in prompts:
            found = beam_search(
                self.trainer,
                self.ids(prompt),
                options,
                self.max_tokens,
                end_tokens,
                self.max_length,
            )
            for hypothesis in found[:num_texts]:
                stream = TextStream(self.stop)
                data = self.tokenizer.decode_bytes(hypothesis.tokens)
                text = stream.feed(data) + stream.finish()
                cut = len(hypothesis.tokens) == self.max_tokens and not stream.stopped
                reason = "length" if cut else "stop"
                yield WrittenText(prompt, text, reason, score=hypothesis.score)

    def ids(self, prompt: str) -> list[int]:
        """Returns the tokens of a prompt; of an empty one, what begins a document."""
        ids = [int(token) for token in self.tokenizer.encode(prompt)]
        return ids or [self.tokenizer.end_of_text_id]

    def _write(self, texts: list[tuple[str, CompletionText]]) -> Iterator[WrittenText]:
        engine = Engine(self.trainer, min(len(texts), _MOST_ROWS), self.max_length)
        for _, text in texts:
            engine.add(text.completion)
        pieces: dict[Completion, str] = {text.completion: "" for _, text in texts}
        tokens: dict[Completion, list[TokenText]] = {text.completion: [] for _, text in texts}
        of = {text.completion: text for _, text in texts}
        num_done = 0
        while num_done < len(texts):
            for completion in engine.step():
                piece = of[completion].take()
                pieces[completion] += piece.text
                tokens[completion] += piece.tokens
            while num_done < len(texts):
                prompt, text = texts[num_done]
                completion = text.completion
                if completion.finish_reason is None:
                    break
                wanted = completion.num_top_logprobs >= 0
                yield WrittenText(
                    prompt,
                    pieces[completion],
                    completion.finish_reason,
                    tuple(tokens[completion]) if wanted else None,
                )
                num_done += 1


def _text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.decode_bytes([token]).decode("utf-8", "backslashreplace")
