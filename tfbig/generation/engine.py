"""Continuous batching: many texts are written at once, each joining and leaving when it may.

TensorFlow-free: the trainer's decode step is all that computes.
"""

import collections
from collections.abc import Iterable
from typing import Any

import numpy as np

from tfbig.generation.completion import Completion
from tfbig.generation.sampling import Sampler, token_logprobs

# Widths in which a prompt is fed, a row at a time. They follow from the prompt alone, so that a
# text's numbers do not depend on what else is being written.
PREFILL_WIDTHS = (8, 64, 256)


def prefill_width(num_tokens: int) -> int:
    """Returns the width of the call that feeds the next of `num_tokens`.

    >>> prefill_width(5), prefill_width(100), prefill_width(1000)
    (8, 256, 256)
    """
    return next((width for width in PREFILL_WIDTHS if width >= num_tokens), PREFILL_WIDTHS[-1])


class _Row:
    """A row of the cache and the completion it is lent to."""

    def __init__(self, index: int, completion: Completion) -> None:
        self.index, self.completion = index, completion
        self.num_fed = 0  # of the prompt's tokens
        self.next_token: int | None = None  # written, not fed yet
        self.sampler = Sampler(
            completion.options, completion.prompt, sorted(completion.end_tokens), completion.choice
        )

    @property
    def fills(self) -> bool:
        """Whether the prompt is not fed whole."""
        return self.num_fed < len(self.completion.prompt)


class Engine:
    """Writes completions with a trainer's decode step, in the rows of one cache.

    Each step feeds at most one piece of one prompt, and then one token of every text that is under
    way, so that a long prompt does not keep the others waiting. Under a layout of several ranks
    every rank runs the same engine with the same completions.

    Args:
      trainer: built, with weights in it.
      num_rows: texts that are written at the same time.
      max_length: positions of the model.
    """

    def __init__(self, trainer: Any, num_rows: int, max_length: int) -> None:
        self._trainer, self.num_rows, self.max_length = trainer, num_rows, max_length
        self._cache = trainer.new_cache(num_rows, max_length)
        self._rows: list[_Row | None] = [None] * num_rows
        self._waiting: collections.deque[Completion] = collections.deque()
        self._filling: collections.deque[_Row] = collections.deque()
        self._source = np.arange(num_rows, dtype=np.int32)
        self._reset = np.zeros(num_rows, bool)

    @property
    def num_waiting(self) -> int:
        """Completions that have no row yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Completions that have a row."""
        return sum(row is not None for row in self._rows)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to write."""
        return not self._waiting and self.num_running == 0

    def close(self) -> None:
        """Lets go of the cache; nothing can be written any more."""
        self._cache = None

    def add(self, completion: Completion) -> None:
        """Queues a completion; it must fit into the model's positions."""
        assert completion.prompt and completion.max_tokens >= 1
        # The last token written is never fed.
        needed = len(completion.prompt) + completion.max_tokens - 1
        assert needed <= self.max_length, "the completion is longer than the model's positions"
        self._waiting.append(completion)

    def step(self) -> list[Completion]:
        """Computes the next tokens.

        Returns:
          Completions that have new tokens, or whose row was freed since the last step.
        """
        ended = self._release()
        self._admit()
        changed = self._feed_prompt()
        changed += self._feed_tokens()
        return ended + [c for c in dict.fromkeys(changed) if c not in ended]

    # Rows.

    def _release(self) -> list[Completion]:
        """Frees the rows of completions that have ended, and forgets those that never had one."""
        ended = [c for c in self._waiting if c.finish_reason is not None]
        if ended:
            self._waiting = collections.deque(c for c in self._waiting if c.finish_reason is None)
        for index, row in enumerate(self._rows):
            if row is not None and row.completion.finish_reason is not None:
                self._rows[index] = None
                ended.append(row.completion)
        self._filling = collections.deque(
            row for row in self._filling if row.completion.finish_reason is None
        )
        return ended

    def _admit(self) -> None:
        """Lends free rows to those who wait longest."""
        for index in self._free_rows():
            if not self._waiting:
                return
            prompt = self._waiting[0].prompt
            if any(row.completion.prompt is prompt for row in self._filling):
                return  # it will go on from that row, once its prompt is fed
            row = _Row(index, self._waiting.popleft())
            self._rows[index] = row
            self._filling.append(row)
            self._reset[index] = True

    def _fork(self, first: _Row, logits: np.ndarray) -> list[Completion]:
        """Lends free rows to the other completions of a prompt that was just fed."""
        changed = []
        for index in self._free_rows():
            if not self._waiting or self._waiting[0].prompt is not first.completion.prompt:
                break
            row = _Row(index, self._waiting.popleft())
            row.num_fed = len(row.completion.prompt)
            self._rows[index] = row
            self._source[index], self._reset[index] = first.index, False
            changed.append(self._write(row, logits))
        return changed

    def _free_rows(self) -> list[int]:
        return [index for index, row in enumerate(self._rows) if row is None]

    # Computing.

    def _feed_prompt(self) -> list[Completion]:
        """Feeds the next piece of the oldest unfinished prompt."""
        if not self._filling:
            return []
        row = self._filling[0]
        rest = row.completion.prompt[row.num_fed :]
        width = prefill_width(len(rest))
        piece = rest[:width]
        tokens = np.zeros((self.num_rows, width), np.int32)
        tokens[row.index, : len(piece)] = piece
        num_valid = np.zeros(self.num_rows, np.int32)
        num_valid[row.index] = len(piece)
        logits = self._decode(tokens, num_valid)[row.index]
        row.num_fed += len(piece)
        if row.fills:
            return []
        self._filling.popleft()
        return [self._write(row, logits), *self._fork(row, logits)]

    def _feed_tokens(self) -> list[Completion]:
        """Feeds the last token of every text that goes on."""
        going = [
            row
            for row in self._rows
            if row is not None and row.next_token is not None and not row.completion.finish_reason
        ]
        if not going:
            return []
        tokens = np.zeros((self.num_rows, 1), np.int32)
        num_valid = np.zeros(self.num_rows, np.int32)
        for row in going:
            assert row.next_token is not None
            tokens[row.index, 0], num_valid[row.index] = row.next_token, 1
        logits = self._decode(tokens, num_valid)
        return [self._write(row, logits[row.index]) for row in going]

    def _decode(self, tokens: np.ndarray, num_valid: np.ndarray) -> np.ndarray:
        logits, self._cache = self._trainer.decode_step(
            tokens, num_valid, self._source, self._reset, self._cache
        )
        self._source = np.arange(self.num_rows, dtype=np.int32)
        self._reset = np.zeros(self.num_rows, bool)
        return logits

    def _write(self, row: _Row, logits: np.ndarray) -> Completion:
        """Chooses the next token of a row."""
        completion = row.completion
        token = row.sampler.choose(logits)
        if token in completion.end_tokens:
            completion.finish("stop")
            return completion
        if completion.num_top_logprobs >= 0:
            completion.logprobs.append(token_logprobs(logits, token, completion.num_top_logprobs))
        completion.written.append(token)
        row.next_token = token
        if len(completion.written) >= completion.max_tokens:
            completion.finish("length")
        return completion


def write_all(engine: Engine, completions: Iterable[Completion]) -> None:
    """Writes completions to their ends."""
    for completion in completions:
        engine.add(completion)
    while not engine.idle:
        engine.step()
