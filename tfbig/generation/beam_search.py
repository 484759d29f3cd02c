"""Beam search: the likeliest texts, several kept at a time.

TensorFlow-free: the trainer's decode step is all that computes. P = beams, V = vocabulary.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tfbig.errors import UserError
from tfbig.generation.engine import prefill_width
from tfbig.generation.sampling import log_probabilities

MOST_BEAMS = 1024


@dataclass(frozen=True)
class BeamOptions:
    """How beams are kept and ended; meanings are those of Hugging Face's generate.

    Args:
      num_beams: texts that are kept at a time.
      length_penalty: a text's score is its log probability / length ** this; above 0 it favours
        longer texts.
      no_repeat_ngram_size: no text has the same n tokens in a row twice, its prompt included; 0 is
        off.
      min_tokens: tokens before which no end token comes.
      early_stopping: True ends as soon as num_beams texts have ended; False when no unfinished
        text of this length could beat them; "never" when none of any length could.
    """

    num_beams: int = 4
    length_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    min_tokens: int = 0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        if not 1 <= self.num_beams <= MOST_BEAMS:
            raise UserError(
                f"--num_beams={self.num_beams} must be at least 1 and at most {MOST_BEAMS}, as each"
                " beam keeps keys and values of its own: give e.g. 4."
            )
        if self.no_repeat_ngram_size < 0:
            raise UserError(
                f"--no_repeat_ngram_size={self.no_repeat_ngram_size} must be at least 0: give 0 "
                "for none."
            )
        if not np.isfinite(self.length_penalty):
            raise UserError(
                f"--length_penalty={self.length_penalty} must be a finite number: give e.g. 1."
            )


@dataclass(frozen=True)
class Hypothesis:
    """A text that a beam search ended with."""

    tokens: tuple[int, ...]  # without the end token
    score: float


class _Ended:
    """The best texts that have ended, at most `num_beams`."""

    def __init__(self, options: BeamOptions, max_tokens: int) -> None:
        self._options, self._max_tokens = options, max_tokens
        self.best: list[Hypothesis] = []

    def add(self, tokens: tuple[int, ...], logprob: float, length: int) -> None:
        """Keeps a text if it is among the best.

        Args:
          tokens: without the end token.
          logprob: of all of it.
          length: tokens that the score divides by, the end token included.
        """
        score = logprob / length**self._options.length_penalty
        self.best.append(Hypothesis(tokens, score))
        self.best.sort(key=lambda hypothesis: -hypothesis.score)
        del self.best[self._options.num_beams :]

    def is_final(self, best_logprob: float, length: int) -> bool:
        """Returns whether no unfinished text can come in.

        Args:
          best_logprob: of the likeliest unfinished text.
          length: of the unfinished texts.
        """
        options = self._options
        if len(self.best) < options.num_beams:
            return False
        if options.early_stopping is True:
            return True
        if options.early_stopping == "never" and options.length_penalty > 0:
            length = self._max_tokens
        return self.best[-1].score >= best_logprob / length**options.length_penalty


def beam_search(
    trainer: Any,
    prompt: list[int],
    options: BeamOptions,
    max_tokens: int,
    end_tokens: frozenset[int],
    max_length: int,
) -> list[Hypothesis]:
    """Returns the best texts that follow a prompt, best first; every rank must call it alike.

    Args:
      trainer: built, with weights in it.
      prompt: at least one token id.
      options: of the search.
      max_tokens: to write at most.
      end_tokens: end a text, and are no part of it.
      max_length: positions of the model.

    Raises:
      UserError: the text could become longer than the model's positions.
    """
    if len(prompt) + max_tokens > max_length:
        raise UserError(
            f"a prompt of {len(prompt)} tokens and --max_tokens={max_tokens} are more than the"
            f" model's {max_length} positions, and beam search forgets nothing."
        )
    num_beams = options.num_beams
    cache = trainer.new_cache(num_beams, max_length)
    logits, cache = _feed_prompt(trainer, prompt, num_beams, cache)
    beams: list[tuple[int, ...]] = [()] * num_beams
    # All beams are the same text at first: only one may go on.
    totals = np.array([0.0] + [-np.inf] * (num_beams - 1))
    ended = _Ended(options, max_tokens)
    nobody = np.zeros(num_beams, bool)
    for length in range(1, max_tokens + 1):
        steps = _next_logprobs(logits, beams, prompt, options, end_tokens)  # (P, V)
        candidates = _candidates(totals[:, np.newaxis] + steps, num_beams, end_tokens)
        kept = []
        for rank, (beam, token, total) in enumerate(candidates):
            if token not in end_tokens:
                kept.append((beam, token, total))
            elif rank < num_beams:  # one that is not among the likeliest is no end
                ended.add(beams[beam], total, length)
        kept = kept[:num_beams]
        if not kept or ended.is_final(kept[0][2], length) or length == max_tokens:
            break
        source, beams, totals = _going_on(kept, beams)
        tokens = np.array([[beam[-1]] for beam in beams], np.int32)  # (P, 1)
        ones = np.ones(num_beams, np.int32)
        logits, cache = trainer.decode_step(tokens, ones, source, nobody, cache)
    if not ended.is_final(kept[0][2] if kept else -np.inf, length):
        for beam, token, total in kept:
            if np.isfinite(total):
                ended.add((*beams[beam], token), total, length)
    return ended.best


def _going_on(
    kept: list[tuple[int, int, float]], beams: list[tuple[int, ...]]
) -> tuple[np.ndarray, list[tuple[int, ...]], np.ndarray]:
    """Returns the beams that go on: (row that each comes from (P,), texts, log probabilities (P,)).

    Args:
      kept: (beam, token, log probability) of each; fewer than P where the vocabulary is small.
      beams: texts so far.
    """
    missing = len(beams) - len(kept)
    source = np.array([beam for beam, _, _ in kept] + [0] * missing, np.int32)
    texts = [(*beams[beam], token) for beam, token, _ in kept]
    texts += [texts[0]] * missing
    totals = np.array([total for _, _, total in kept] + [-np.inf] * missing)
    return source, texts, totals


def _feed_prompt(
    trainer: Any, prompt: list[int], num_beams: int, cache: Any
) -> tuple[np.ndarray, Any]:
    """Feeds the prompt to the first beam and gives all beams its cache."""
    rows = np.arange(num_beams, dtype=np.int32)
    fed = 0
    while fed < len(prompt):
        width = prefill_width(len(prompt) - fed)
        piece = prompt[fed : fed + width]
        tokens = np.zeros((num_beams, width), np.int32)
        tokens[0, : len(piece)] = piece
        num_valid = np.where(rows == 0, len(piece), 0).astype(np.int32)
        reset = np.full(num_beams, fed == 0)
        logits, cache = trainer.decode_step(tokens, num_valid, rows, reset, cache)
        fed += len(piece)
    if num_beams > 1:
        nothing = np.zeros(num_beams, np.int32)
        tokens = np.zeros((num_beams, 1), np.int32)
        logits, cache = trainer.decode_step(tokens, nothing, nothing, rows < 0, cache)
    return logits, cache


def _next_logprobs(
    logits: np.ndarray,
    beams: list[tuple[int, ...]],
    prompt: list[int],
    options: BeamOptions,
    end_tokens: frozenset[int],
) -> np.ndarray:
    """Returns log probabilities (P, V) of each beam's next token, forbidden ones at -inf."""
    logprobs = np.stack([log_probabilities(row) for row in logits])
    if len(beams[0]) < options.min_tokens:
        logprobs[:, sorted(end_tokens)] = -np.inf
    size = options.no_repeat_ngram_size
    if size:
        for row, beam in zip(logprobs, beams, strict=True):
            row[_repeating([*prompt, *beam], size)] = -np.inf
    return logprobs


def _repeating(text: list[int], size: int) -> list[int]:
    """Returns the tokens that would make the last `size` tokens a repetition.

    >>> _repeating([1, 2, 3, 1, 2], 3)
    [3]
    """
    last = text[len(text) - size + 1 :] if size > 1 else []
    starts = range(len(text) - size + 1)
    return [text[k + size - 1] for k in starts if text[k : k + size - 1] == last]


def _candidates(
    totals: np.ndarray, num_beams: int, end_tokens: frozenset[int]
) -> list[tuple[int, int, float]]:
    """Returns the likeliest (beam, token, log probability), likeliest first.

    Enough of them that num_beams do not end, whatever does.
    """
    flat = totals.reshape(-1)  # (P*V,)
    count = min(num_beams * (1 + max(len(end_tokens), 1)), len(flat))
    chosen = np.argpartition(-flat, count - 1)[:count]
    chosen = np.sort(chosen)
    chosen = chosen[np.argsort(-flat[chosen], kind="stable")]
    chosen = chosen[np.isfinite(flat[chosen])]
    size = totals.shape[1]
    return [(int(k) // size, int(k) % size, float(flat[k])) for k in chosen]
