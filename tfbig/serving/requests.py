"""What a client asks for, read from the JSON of each API. TensorFlow-free."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tfbig.errors import near_matches
from tfbig.generation.sampling import MAX_TOP_LOGPROBS, SamplingOptions
from tfbig.serving.chat import ChatTemplate
from tfbig.serving.errors import RequestError
from tfbig.serving.fields import Fields, checked_text, shown
from tfbig.serving.sampling_fields import SamplingFields, is_id

# What /invocations takes of Hugging Face's parameters.
_PARAMETERS = (
    "max_new_tokens min_new_tokens num_return_sequences return_full_text do_sample temperature"
    " top_k top_p min_p seed repetition_penalty presence_penalty frequency_penalty logit_bias stop"
    " stop_sequences stop_token_ids ignore_eos stream"
).split()
# Those that change nothing at these values, and are not served at others.
_INERT: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "early_stopping": (False,),
    "length_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "typical_p": (1,),
    "best_of": (1,),
    "watermark": (False,),
    "details": (False,),
    "decoder_input_details": (False,),
    "use_cache": (True, False),
}


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
    max_prompt_bytes: int  # more text than this is surely more tokens than positions


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
        self._sampling = SamplingFields(tokenizer.vocab_size, limits.max_length)

    def completions(self, body: Mapping[str, Any]) -> GenerationRequest:
        """Returns the request of a body of /v1/completions.

        Raises:
          RequestError: a field is wrong.
        """
        fields = Fields(body)
        self._check_model(fields)
        fields.refuse("use_beam_search", (False,), "texts are sampled here")
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
        fields.refuse("use_beam_search", (False,), "texts are sampled here")
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
            [self._encoded("messages", text, self._encode_chat)],
            [None],
            ("max_completion_tokens", "max_tokens"),
            default_tokens=0,
            temperature=1.0,
            num_choices=num_choices,
            num_top_logprobs=num_top if wanted else -1,
        )

    def invocation(self, body: Mapping[str, Any]) -> GenerationRequest:
        """Returns the request of a body of Hugging Face's SageMaker toolkit.

        Raises:
          RequestError: a field is wrong.
        """
        parameters = body.get("parameters")
        parameters = {} if parameters is None else parameters
        if not isinstance(parameters, Mapping):
            raise RequestError("parameters must be an object.", parameter="parameters")
        _check_names("the body", body, ("inputs", "parameters", "stream", "model"))
        self._check_model(Fields(body))
        _check_names("parameters", parameters, (*_PARAMETERS, *_INERT))
        fields = Fields(
            {
                "stream": body.get("stream"),
                **parameters,
                "max_tokens": parameters.get("max_new_tokens"),
                "min_tokens": parameters.get("min_new_tokens"),
                "n": parameters.get("num_return_sequences"),
                "stop": parameters.get("stop", parameters.get("stop_sequences")),
            }
        )
        for name, harmless in _INERT.items():
            fields.refuse(name, harmless, "texts are sampled, one token after the other")
        num_choices = fields.integer("n", 1, 1, self._limits.max_choices)
        sample = fields.flag("do_sample", parameters.get("temperature") is not None)
        prompts, texts = self._prompts(body.get("inputs"), "inputs", num_choices)
        if any(text is None for text in texts):
            raise RequestError("inputs must be a string or strings.", parameter="inputs")
        return self._request(
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
            self._sampling.options(fields, temperature, fixed),
            [self._max_tokens(fields, length_fields, default_tokens, len(p)) for p in prompts],
            num_choices,
            self._sampling.stop(fields.get("stop")),
            frozenset(
                end_tokens | self._sampling.ids(fields.get("stop_token_ids"), "stop_token_ids")
            ),
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
        several = isinstance(prompt, list) and not (prompt and is_id(prompt[0]))
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
                ids = [int(k) for k in item if is_id(k) and 0 <= k < self._tokenizer.vocab_size]
                if len(ids) != len(item) or not ids:
                    raise RequestError(
                        f"{name} must be a string, strings, token ids below"
                        f" {self._tokenizer.vocab_size} or lists of them.",
                        parameter=name,
                    )
                texts.append(None)
            else:
                text = checked_text(name, item)
                ids = [int(k) for k in self._encoded(name, text, self._tokenizer.encode)]
                texts.append(text)
            # Nothing to go on from: the start of a document.
            prompts.append(ids or [self._tokenizer.end_of_text_id])
        return prompts, texts

    def _encoded(self, name: str, text: str, encode: Callable[[str], Any]) -> Any:
        """Returns a text's tokens, unless it is too long whatever they are."""
        if len(text) > self._limits.max_prompt_bytes:  # a character is a byte at least
            raise RequestError(
                f"{name} has {len(text)} characters, more than the model's"
                f" {self._limits.max_length} positions can hold.",
                code="context_length_exceeded",
                parameter=name,
            )
        return encode(text)

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


def _check_names(where: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises RequestError for a field that would change nothing."""
    for name in given:
        if name not in known:
            near = near_matches(name[:80], list(known))
            raise RequestError(
                f"{where} has an unknown field {shown(name)}.{near}", parameter=name[:80]
            )
