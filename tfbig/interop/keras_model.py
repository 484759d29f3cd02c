"""A GPT as Keras saves and loads it: `keras.models.load_model` after importing this module."""

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from tfbig.config import ModelConfig
from tfbig.model.gpt import GPT


@keras.saving.register_keras_serializable(package="tfbig")
class ExportedGPT(keras.Model):
    """A GPT that is described by its own configuration, as Keras' files need it.

    Args:
      model: fields of ModelConfig.

    Attributes:
      gpt: the model.

    Example:
      import keras, tfbig.interop.keras_model
      model = keras.models.load_model("model.keras")
      logits = model(tokens)  # (B, T, V)
    """

    def __init__(self, model: dict[str, Any], name: str = "exported_gpt", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self._fields = dict(model)
        config = ModelConfig(**self._fields)
        self.gpt = GPT.from_config(config, initial_values=False, attention="plain")
        self.built = True

    @classmethod
    def of(cls, config: ModelConfig) -> "ExportedGPT":
        """Returns the model, its weights still zero, that `config` describes."""
        return cls(dataclasses.asdict(config))

    def call(self, tokens: tf.Tensor, training: bool = False) -> tf.Tensor:
        """Returns logits (B, T, V) of tokens (B, T) int32."""
        return self.gpt(tokens, training=training)

    def get_config(self) -> dict[str, Any]:
        return {"model": self._fields, "name": self.name}

    def build_from_config(self, config: dict[str, Any]) -> None:
        """Does nothing: the constructor has made all variables."""
