"""What the exchange with Hugging Face needs to know of an architecture. TensorFlow-free."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tfbig.config import ModelConfig
from tfbig.errors import UserError
from tfbig.interop.tensor_view import TensorView

Activation = Literal["gelu_tanh", "gelu", "relu"]
# Names that transformers gives to the functions that we have; the first of each is written.
_ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "gelu_tanh": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
    "gelu": ("gelu", "gelu_python"),
    "relu": ("relu",),
}


@dataclass(frozen=True)
class Architecture:
    """One architecture of the transformers library.

    Attributes:
      model_type: its name in config.json.
      class_name: of its language model, for config.json.
      prefix: of its tensors but the head's; files without it are read too.
      head_names: of an untied head's tensor; the first is written.
      ignored: endings of tensors that hold no weights (masks, angles).
      read_fields: config.json -> values of ModelConfig's fields.
      write_fields: model -> entries of config.json.
      views: model -> stored tensor by canonical path.
      query_scales: config.json, layer -> what its queries are multiplied by beyond ours.
      has_attention_bias: config.json -> whether the attention's projections have biases.
    """

    model_type: str
    class_name: str
    prefix: str
    head_names: tuple[str, ...]
    ignored: tuple[str, ...]
    read_fields: Callable[[Mapping[str, Any]], dict[str, Any]]
    write_fields: Callable[[ModelConfig], dict[str, Any]]
    views: Callable[[ModelConfig], dict[str, TensorView]]
    query_scale: Callable[[Mapping[str, Any], int], float]
    has_attention_bias: Callable[[Mapping[str, Any]], bool]


def activation_from(name: str) -> str:
    """Returns our name of an activation function.

    Raises:
      UserError: we have no such function.

    >>> activation_from("gelu_new")
    'gelu_tanh'
    """
    for ours, theirs in _ACTIVATIONS.items():
        if name in theirs:
            return ours
    known = ", ".join(word for words in _ACTIVATIONS.values() for word in words)
    raise UserError(f"its activation {name!r} is none that tfbig has: {known}.")


def activation_to(name: str) -> str:
    """Returns transformers' name of an activation function of ours."""
    return _ACTIVATIONS[name][0]


def head_view(name: str, model: ModelConfig) -> TensorView:
    """Returns the view of an untied head's (V, D) tensor; ours is (D, V)."""
    shape = (model.vocab_size, model.embed_dim)
    return TensorView(name, shape, shape, (1, 0))
