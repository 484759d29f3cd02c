"""Writes a continuation of a prompt with a trainer's decode step."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tfbig.generation.engine import prefill_width
from tfbig.generation.sampling import Sampler, SamplingOptions


def generate_tokens(
    trainer: Any,
    prompt: Sequence[int],
    options: SamplingOptions,
    max_length: int,
    max_tokens: int,
    end_token: int,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[int]:
    """Yields the token ids that follow a prompt; every rank must consume it alike.

    When the model's positions are used up, the oldest half of the text is forgotten.

    Args:
      trainer: built, with weights in it.
      prompt: at least one token id.
      options: of the sampling.
      max_length: positions of the model.
      max_tokens: to write at most.
      end_token: ends the text; not yielded.
      stopped: asked after each token.
    """
    sampler = Sampler(options, prompt, [end_token])
    text = list(prompt)[-max_length:]
    cache = trainer.new_cache(1, max_length)
    row = np.zeros(1, np.int32)
    new, held = text, 0  # tokens to feed, tokens in the cache
    for _ in range(max_tokens):
        if held + len(new) > max_length:
            new, held = text[-(max_length // 2 or 1) :], 0
        while new:
            width = prefill_width(len(new)) if len(new) > 1 else 1
            piece, new = new[:width], new[width:]
            tokens = np.zeros((1, width), np.int32)
            tokens[0, : len(piece)] = piece
            count = np.array([len(piece)], np.int32)
            logits, cache = trainer.decode_step(tokens, count, row, np.array([held == 0]), cache)
            held += len(piece)
        token = sampler.choose(logits[0])
        if token == end_token:
            return
        yield token
        if stopped():
            return
        text.append(token)
        new = [token]
