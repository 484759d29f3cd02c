"""What a client asks for, read from the JSON of each API. TensorFlow-free."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tfbig.errors import UserError
from tfbig.generation.sampling import MAX_TOP_LOGPROBS, SamplingOptions
from tfbig.serving.chat import ChatTemplate
from tfbig.serving.errors import RequestError
from tfbig.serving.fields import Fields, checked_text, shown

_LARGEST_SEED = (1 << 63) - 1
_MOST_BIASES, _MOST_STOPS, _LONGEST_STOP = 1024, 16, 256


class Encoder(Protocol):
    """What is needed of data_pipeline.tokenizer.Tokenizer."""

    vocab_size: int
    end_of_text_id: int

    def encode(self, text: str) -> Any: ...


@dataclass(frozen=True)
class Limits:
    """What a request may ask for."""

    max_length: int  # positions of the model
    max_tokens: int  # of one text
    max_choices: int  # prompts x n


@dataclass(frozen=True)
class GenerationRequest:
    """What a request asks for, whatever the API.

    Attributes:
      prompts: token ids of each.
      prompt_texts: the same as text, where it was given so; for echo.
      num_choices: texts for each prompt.
      num_top_logprobs: -1 reports none.
    """

    prompts: list[list[int]]
    prompt_texts: list[str | None]
    options: SamplingOptions
    max_tokens: list[int]  # by prompt
    num_choices: int = 1
    stop: tuple[str, ...] = ()
    end_tokens: frozenset[int] = frozenset()
    num_top_logprobs: int = -1
    echo: bool = False
    stream: bool = False
    include_usage: bool = False


class RequestReader:
    """Reads requests to one model.

    Args:
      tokenizer: of the model.
      encode_chat: gives the ids of a rendered chat template, special tokens' names understood.
      template: of its chats.
      limits: of a request.
      model_name: that a request may name.
    """

    def __init__(
        self,
        tokenizer: Encoder,
        encode_chat: Any,
        template: ChatTemplate,
        limits: Limits,
        model_name: str,
    ) -> None:
        self._tokenizer, self._encode_chat, self._template = tokenizer, encode_chat, template
        self._limits, self._model_name = limits, model_name

    def completions(self, body: Mapping[str, Any]) -> GenerationRequest:
        """Returns the request of a body of /v1/completions.

        Raises:
          RequestError: a field is wrong.
        """
        fields = Fields(body)
        self._check_model(fields)
        fields.refuse("suffix", ("",), "the model only continues a text")
        num_choices = fields.integer("n", 1, 1, self._limits.max_choices)
        fields.refuse("best_of", (num_choices,), "ask for n texts instead")
        prompts, texts = self._prompts(fields.get("prompt"), "prompt", num_choices)
        num_logprobs = fields.integer("logprobs", -1, 0, MAX_TOP_LOGPROBS)
        echo = fields.flag("echo")
        if echo and num_logprobs >= 0:
            raise RequestError("echo cannot be combined with logprobs.", parameter="echo")
        return self._request(
            fields,
            prompts,
            texts,
            ("max_tokens",),
            default_tokens=16,
            temperature=1.0,
            num_choices=num_choices,
            num_top_logprobs=num_logprobs,
            echo=echo,
        )

    def chat(self, body: Mapping[str, Any]) -> GenerationRequest:
        """Returns the request of a body of /v1/chat/completions.

        Raises:
          RequestError: a field is wrong.
        """
        fields = Fields(body)
        self._check_model(fields)
        for name in ("tools", "functions"):
            fields.refuse(name, ([],), "the model calls no tools")
        fields.refuse("response_format", ({"type": "text"},), "only text is written")
        fields.refuse("modalities", (["text"],), "only text is written")
        text = self._template.render(fields.get("messages"))
        num_choices = fields.integer("n", 1, 1, self._limits.max_choices)
        wanted = fields.flag("logprobs")
        num_top = fields.integer("top_logprobs", 0, 0, MAX_TOP_LOGPROBS)
        if num_top and not wanted:
            raise RequestError("top_logprobs needs logprobs to be true.", parameter="top_logprobs")
        return self._request(
            fields,
            [self._encode_chat(text)],
            [None],
            ("max_completion_tokens", "max_tokens"),
            default_tokens=0,
            temperature=1.0,
            num_choices=num_choices,
            num_top_logprobs=num_top if wanted else -1,
        )

    def invocation(self, body: Mapping[str, Any]) -> tuple[GenerationRequest, bool]:
        """Returns the request of a body of Hugging Face's SageMaker toolkit.

        Returns:
          (request, whether the prompt is part of the answer's text).

        Raises:
          RequestError: a field is wrong.
        """
        parameters = body.get("parameters")
        parameters = {} if parameters is None else parameters
        if not isinstance(parameters, Mapping):
            raise RequestError("parameters must be an object.", parameter="parameters")
        fields = Fields(
            {
                **parameters,
                "max_tokens": parameters.get("max_new_tokens"),
                "min_tokens": parameters.get("min_new_tokens"),
                "n": parameters.get("num_return_sequences"),
                "stop": parameters.get("stop", parameters.get("stop_sequences")),
            }
        )
        fields.refuse("num_beams", (1,), "beam search is not served")
        num_choices = fields.integer("n", 1, 1, self._limits.max_choices)
        sample = fields.flag("do_sample", parameters.get("temperature") is not None)
        prompts, texts = self._prompts(body.get("inputs"), "inputs", num_choices)
        if any(text is None for text in texts):
            raise RequestError("inputs must be a string or strings.", parameter="inputs")
        request = self._request(
            fields,
            prompts,
            texts,
            ("max_tokens",),
            default_tokens=20,
            temperature=1.0 if sample else 0.0,
            num_choices=num_choices,
            fixed=not sample,
            echo=fields.flag("return_full_text", True),
        )
        return request, request.echo

    # Parts.

    def _check_model(self, fields: Fields) -> None:
        name = fields.text("model", self._model_name)
        if name != self._model_name:
            raise RequestError(
                f"there is no model {shown(name)} here, only {self._model_name!r}.",
                404,
                parameter="model",
                code="model_not_found",
            )

    def _request(
        self,
        fields: Fields,
        prompts: list[list[int]],
        texts: list[str | None],
        length_fields: Sequence[str],
        *,
        default_tokens: int,
        temperature: float,
        num_choices: int,
        num_top_logprobs: int = -1,
        echo: bool = False,
        fixed: bool = False,
    ) -> GenerationRequest:
        stream = fields.flag("stream")
        end_tokens = set() if fields.flag("ignore_eos") else {self._tokenizer.end_of_text_id}
        return GenerationRequest(
            prompts,
            texts,
            self._options(fields, temperature, fixed),
            [self._max_tokens(fields, length_fields, default_tokens, len(p)) for p in prompts],
            num_choices,
            self._stop(fields.get("stop")),
            frozenset(end_tokens | self._ids(fields.get("stop_token_ids"), "stop_token_ids")),
            num_top_logprobs,
            echo,
            stream,
            self._include_usage(fields, stream),
        )

    def _prompts(
        self, prompt: Any, name: str, num_choices: int
    ) -> tuple[list[list[int]], list[str | None]]:
        """Returns the ids of each prompt, and its text where there is one."""
        if prompt is None:
            raise RequestError(f"{name} is missing.", parameter=name)
        several = isinstance(prompt, list) and not (prompt and _is_id(prompt[0]))
        items = prompt if several else [prompt]
        if not items:
            raise RequestError(f"{name} is an empty list.", parameter=name)
        if len(items) * num_choices > self._limits.max_choices:
            raise RequestError(
                f"{len(items)} prompts x n={num_choices} are more than the"
                f" {self._limits.max_choices} texts that one request may ask for.",
                parameter=name,
            )
        prompts: list[list[int]] = []
        texts: list[str | None] = []
        for item in items:
            if isinstance(item, list):
                ids = [int(k) for k in item if _is_id(k) and 0 <= k < self._tokenizer.vocab_size]
                if len(ids) != len(item) or not ids:
                    raise RequestError(
                        f"{name} must be a string, strings, token ids below"
                        f" {self._tokenizer.vocab_size} or lists of them.",
                        parameter=name,
                    )
                texts.append(None)
            else:
                text = checked_text(name, item)
                ids = [int(k) for k in self._tokenizer.encode(text)]
                texts.append(text)
            # Nothing to go on from: the start of a document.
            prompts.append(ids or [self._tokenizer.end_of_text_id])
        return prompts, texts

    def _max_tokens(
        self, fields: Fields, names: Sequence[str], default: int, prompt_length: int
    ) -> int:
        limits = self._limits
        room = limits.max_length - prompt_length
        if room < 1:
            raise RequestError(
                f"the prompt has {prompt_length} tokens; the model has {limits.max_length}"
                " positions, one of which must be left.",
                code="context_length_exceeded",
                parameter="prompt",
            )
        for name in names:
            if fields.get(name) is None:
                continue
            wanted = fields.integer(name, 0, 1, limits.max_tokens)
            if wanted > room:
                raise RequestError(
                    f"{prompt_length} tokens of prompt and {name}={wanted} are more than the"
                    f" model's {limits.max_length} positions: ask for at most {room}.",
                    code="context_length_exceeded",
                    parameter=name,
                )
            return wanted
        return min(default or limits.max_tokens, limits.max_tokens, room)

    def _options(self, fields: Fields, temperature: float, fixed: bool) -> SamplingOptions:
        seed = fields.integer("seed", -1, -(1 << 63), _LARGEST_SEED)
        seed = secrets.randbits(63) if fields.get("seed") is None else seed % (1 << 64)
        top_k = fields.integer("top_k", 0, -1, 1 << 31)  # -1 is vLLM's word for all
        try:
            return SamplingOptions(
                temperature=temperature
                if fixed
                else fields.number("temperature", temperature, 0, 2),
                top_k=max(top_k, 0),
                top_p=fields.number("top_p", 1.0, 1e-9, 1.0),
                seed=seed,
                min_p=fields.number("min_p", 0.0, 0.0, 1.0),
                repetition_penalty=fields.number("repetition_penalty", 1.0, 1e-3, 1e3),
                presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
                frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
                logit_bias=self._logit_bias(fields.get("logit_bias")),
                min_tokens=fields.integer("min_tokens", 0, 0, self._limits.max_length),
            )
        except UserError as error:
            raise RequestError(str(error).replace("--", "")) from None

    def _logit_bias(self, value: Any) -> dict[int, float]:
        if value is None:
            return {}
        if not isinstance(value, Mapping) or len(value) > _MOST_BIASES:
            raise RequestError(
                f"logit_bias must be an object of at most {_MOST_BIASES} token ids.",
                parameter="logit_bias",
            )
        ids = {}
        for key in value:
            if not (key.isascii() and key.isdigit() and len(key) <= 9):
                raise RequestError(f"{shown(key)} is no token id.", parameter="logit_bias")
            ids[key] = self._one_id(int(key), "logit_bias")
        biases = Fields(value)
        return {ids[key]: biases.number(key, 0.0, -100.0, 100.0) for key in value}

    def _stop(self, value: Any) -> tuple[str, ...]:
        if value is None:
            return ()
        items = value if isinstance(value, list) else [value]
        if len(items) > _MOST_STOPS:
            raise RequestError(f"at most {_MOST_STOPS} stop strings.", parameter="stop")
        texts = tuple(checked_text("stop", item) for item in items)
        if not all(0 < len(text) <= _LONGEST_STOP for text in texts):
            raise RequestError(
                f"a stop string has 1 to {_LONGEST_STOP} characters.", parameter="stop"
            )
        return texts

    def _ids(self, value: Any, name: str) -> set[int]:
        if value is None:
            return set()
        if not isinstance(value, list) or len(value) > _MOST_BIASES:
            raise RequestError(f"{name} must be a list of token ids.", parameter=name)
        return {self._one_id(item, name) for item in value}

    def _one_id(self, value: Any, name: str) -> int:
        if not _is_id(value) or not 0 <= value < self._tokenizer.vocab_size:
            raise RequestError(
                f"{name}: {shown(value)} is no token id; they are below"
                f" {self._tokenizer.vocab_size}.",
                parameter=name,
            )
        return int(value)

    @staticmethod
    def _include_usage(fields: Fields, stream: bool) -> bool:
        options = fields.get("stream_options")
        if options is None:
            return False
        if not isinstance(options, Mapping):
            raise RequestError("stream_options must be an object.", parameter="stream_options")
        if not stream:
            raise RequestError(
                "stream_options needs stream to be true.", parameter="stream_options"
            )
        return Fields(options).flag("include_usage")


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
