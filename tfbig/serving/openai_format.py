"""Answers as the OpenAI API gives them. TensorFlow-free."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tfbig.generation.completion import Completion, Piece, TokenText
from tfbig.serving.requests import GenerationRequest


class Decoder(Protocol):
    """What is needed of data_pipeline.tokenizer.Tokenizer."""

    def decode_bytes(self, ids: Sequence[int]) -> bytes: ...


@dataclass
class Choice:
    """One text of an answer, as it grows."""

    completion: Completion
    prefix: str = ""  # the prompt, where it is echoed
    text: str = ""
    tokens: list[TokenText] = field(default_factory=list)
    finish_reason: str | None = None
    num_sent: int = 0  # characters of text that a stream has sent

    def add(self, piece: Piece) -> None:
        """Takes in what is new."""
        self.text += piece.text
        self.tokens += piece.tokens
        self.finish_reason = piece.finish_reason


class Answer:
    """Builds the answer to one request.

    Args:
      request: what was asked for.
      choices: its texts, n for each prompt in order.
      model_name: of the model.
      tokenizer: of the model.
    """

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        request: GenerationRequest,
        choices: Sequence[Choice],
        model_name: str,
        tokenizer: Decoder,
    ) -> None:
        self.request, self.choices = request, list(choices)
        self._model_name, self._tokenizer = model_name, tokenizer
        self._id, self._created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())

    def body(self) -> dict[str, Any]:
        """Returns the whole answer."""
        choices = [self._choice(index, choice) for index, choice in enumerate(self.choices)]
        return {**self._head(self.whole), "choices": choices, "usage": self.usage()}

    def first_chunks(self) -> list[dict[str, Any]]:
        """Returns what a stream begins with."""
        return [
            self._chunk(index, self._delta(choice.prefix), None)
            for index, choice in enumerate(self.choices)
            if choice.prefix
        ]

    def next_chunk(self, index: int, piece: Piece) -> dict[str, Any] | None:
        """Returns what a stream sends for a piece of a text, None for an empty one."""
        if not piece.text and not piece.tokens and piece.finish_reason is None:
            return None
        logprobs = self._logprobs(piece.tokens) if self._wants_logprobs else None
        return self._chunk(index, self._delta(piece.text), piece.finish_reason, logprobs)

    def usage_chunk(self) -> dict[str, Any]:
        """Returns what a stream ends with where its usage is wanted."""
        return {**self._head(self.chunk), "choices": [], "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        """Returns the tokens read and written; a prompt counts once, however many texts follow."""
        prompt = sum(len(ids) for ids in self.request.prompts)
        written = sum(len(choice.completion.written) for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
        }

    # What differs between the two forms.

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        return {
            "index": index,
            "text": choice.prefix + choice.text,
            "logprobs": self._logprobs(choice.tokens) if self._wants_logprobs else None,
            "finish_reason": choice.finish_reason,
        }

    def _delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any]:
        return {
            "tokens": [self._text_of(token.logprobs.token) for token in tokens],
            "token_logprobs": [token.logprobs.logprob for token in tokens],
            "top_logprobs": [
                {self._text_of(other): value for other, value in reversed(token.logprobs.top)}
                for token in tokens
            ],
            "text_offset": [token.offset for token in tokens],
        }

    # What is common.

    @property
    def _wants_logprobs(self) -> bool:
        return self.request.num_top_logprobs >= 0

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model_name,
        }

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish_reason: str | None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, **delta, "logprobs": logprobs, "finish_reason": finish_reason}
        usage = {"usage": None} if self.request.include_usage else {}
        return {**self._head(self.chunk), "choices": [choice], **usage}

    def _text_of(self, token: int) -> str:
        data = self._tokenizer.decode_bytes([token])
        try:
            return data.decode()
        except UnicodeDecodeError:  # part of a character; the API's own name for it
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class ChatAnswer(Answer):
    """Builds the answer to a chat."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first_chunks(self) -> list[dict[str, Any]]:
        return [
            self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None)
            for index in range(len(self.choices))
        ]

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        found = super()._choice(index, choice)
        message = {"role": "assistant", "content": found.pop("text"), "refusal": None}
        return {"index": index, "message": message, **found}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any]:
        content = []
        for token in tokens:
            found = token.logprobs
            entry = self._entry(found.token, found.logprob)
            entry["top_logprobs"] = [self._entry(other, value) for other, value in found.top]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        # JSON has no infinity; the API's own floor is -9999.
        return {
            "token": self._text_of(token),
            "logprob": max(logprob, -9999.0),
            "bytes": list(self._tokenizer.decode_bytes([token])),
        }
