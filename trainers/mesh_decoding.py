"""Decoding where a model is cut over ranks: each keeps keys and values of its own heads and blocks.

R = rows, N = new tokens of a row, V = vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfbig.model.gpt import GPT
from trainers.decode_cache import DecodeCache
from trainers.decoding import Decoder
from trainers.pipeline_program import Program
from trainers.pipeline_stepper import Stepper


class MeshDecoder:
    """One rank's part of the decode step.

    Args:
      models: this rank's chunks, in order.
      stepper: of the same chunks.
      program: a forward pass of one microbatch through all stages.
    """

    def __init__(self, models: Sequence[GPT], stepper: Stepper, program: Program) -> None:
        self._stepper, self._program = stepper, program
        self._width = models[0].config.embed_dim
        self._decoders = []
        for model in models:
            values = {path: v.value for path, v in model.canonical_variables().items()}
            self._decoders.append(Decoder(model, values, None))

    def new_cache(self, num_rows: int, max_length: int) -> list[DecodeCache]:
        """Returns an empty cache for each chunk; arguments as for Trainer.new_cache."""
        return [decoder.new_cache(num_rows, max_length) for decoder in self._decoders]

    def step(
        self,
        tokens: np.ndarray,
        num_valid: np.ndarray,
        source_row: np.ndarray,
        reset: np.ndarray,
        cache: list[DecodeCache],
    ) -> tuple[tf.Tensor | None, list[DecodeCache]]:
        """Returns the last stage's logits (R, V of this rank), None on the others, and the cache.

        Arguments as for Trainer.decode_step.
        """
        feeds = [
            decoder.begin(tokens, num_valid, source_row, reset, part)
            for decoder, part in zip(self._decoders, cache, strict=True)
        ]

        def run(chunk: int, hidden: tf.Tensor | None) -> tf.Tensor:
            entering = tf.constant(feeds[chunk].tokens) if hidden is None else hidden
            return self._decoders[chunk].run(feeds[chunk], entering, cache[chunk])

        shape = (*feeds[0].tokens.shape, self._width)  # (b, N, D) between stages
        return self._stepper.decode(self._program, shape, run), cache
