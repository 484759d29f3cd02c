"""LoRA adapters merged into the kernels they stand beside. TensorFlow-free.

Source: LoRA (arXiv 2106.09685, section 4.1): the merged kernel is W + alpha / rank x A B.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tfbig.config import ModelConfig
from tfbig.variables import is_adapter


def has_adapters(paths: Iterable[str]) -> bool:
    """Returns whether a checkpoint of these variables has adapters."""
    return any(is_adapter(path) for path in paths)


def merged_model(model: ModelConfig) -> ModelConfig:
    """Returns the model that the merged weights are of."""
    return dataclasses.replace(model, lora_rank=0)


class MergedReader:
    """Shows weights and adapters as weights alone, any rectangle without the rest.

    Args:
      reader: of weights with adapters.
      alpha: lora_alpha of the model.

    Attributes:
      directory: of the reader, for messages.

    Example:
      >>> kernel = MergedReader(reader, 16.0).read("transformer_blocks/0/ffn/up/kernel")
    """

    def __init__(self, reader: Any, alpha: float) -> None:
        self._reader, self._alpha = reader, alpha
        self.directory = getattr(reader, "directory", "")

    def has(self, path: str) -> bool:
        """Returns whether there is a variable; adapters are none."""
        return not is_adapter(path) and self._reader.has(path)

    def shape(self, path: str) -> tuple[int, ...]:
        """Returns a variable's whole shape."""
        return self._reader.shape(path)

    def read(
        self, path: str, start: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> np.ndarray:
        """Returns a rectangle of a variable, with its adapter added where it has one.

        Args:
          path: canonical.
          start: first index in every dim; the origin when left out.
          shape: extent in every dim; all that follows `start` when left out.
        """
        value = self._reader.read(path, start, shape)
        prefix, _, name = path.rpartition("/")
        if name != "kernel" or not self._reader.has(f"{prefix}/lora_a"):
            return value
        start = tuple(start) if start is not None else (0,) * value.ndim
        num_summed = 2 if prefix.endswith("att/out") else 1  # dims of the kernel's input
        rank = self._reader.shape(f"{prefix}/lora_a")[-1]
        down = self._reader.read(
            f"{prefix}/lora_a", (*start[:num_summed], 0), (*value.shape[:num_summed], rank)
        )
        up = self._reader.read(
            f"{prefix}/lora_b", (0, *start[num_summed:]), (rank, *value.shape[num_summed:])
        )
        product = np.tensordot(down.astype(np.float64), up.astype(np.float64), 1)
        return (value + product * (self._alpha / rank)).astype(value.dtype)
