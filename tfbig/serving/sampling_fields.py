"""How a text is drawn and where it ends, read from a request's fields. TensorFlow-free."""

import secrets
from collections.abc import Mapping
from typing import Any

from tfbig.errors import UserError
from tfbig.generation.sampling import SamplingOptions
from tfbig.serving.errors import RequestError
from tfbig.serving.fields import Fields, checked_text, shown

_LARGEST_SEED = (1 << 63) - 1
_MOST_BIASES, _MOST_STOPS, _LONGEST_STOP = 1024, 16, 256


class SamplingFields:
    """Reads what all of the APIs have in common.

    Args:
      vocab_size: token ids are below it.
      max_length: positions of the model.
    """

    def __init__(self, vocab_size: int, max_length: int) -> None:
        self._vocab_size, self._max_length = vocab_size, max_length

    def options(self, fields: Fields, temperature: float, fixed: bool) -> SamplingOptions:
        """Returns how a text is drawn.

        Args:
          fields: of the request.
          temperature: where the request has none.
          fixed: whether the request's does not count.

        Raises:
          RequestError: a field is wrong.
        """
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
                min_tokens=fields.integer("min_tokens", 0, 0, self._max_length),
            )
        except UserError as error:
            raise RequestError(str(error).replace("--", "")) from None

    def stop(self, value: Any) -> tuple[str, ...]:
        """Returns the stop strings of a field's value.

        Raises:
          RequestError: it is none, or they are too many or too long.
        """
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

    def ids(self, value: Any, name: str) -> set[int]:
        """Returns the token ids of a field's value.

        Raises:
          RequestError: they are none, or too many.
        """
        if value is None:
            return set()
        if not isinstance(value, list) or len(value) > _MOST_BIASES:
            raise RequestError(f"{name} must be a list of token ids.", parameter=name)
        return {self._one_id(item, name) for item in value}

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

    def _one_id(self, value: Any, name: str) -> int:
        if not is_id(value) or not 0 <= value < self._vocab_size:
            raise RequestError(
                f"{name}: {shown(value)} is no token id; they are below {self._vocab_size}.",
                parameter=name,
            )
        return int(value)


def is_id(value: Any) -> bool:
    """Returns whether a value of JSON is an integer."""
    return isinstance(value, int) and not isinstance(value, bool)
