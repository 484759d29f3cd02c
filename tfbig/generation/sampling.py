"""Choosing the next token from logits. TensorFlow-free."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tfbig.errors import UserError

_FEW = 1024  # likely tokens among which top_p is sought before all are sorted
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingOptions:
    """How a token is chosen.

    Args:
      temperature: divides the logits; 0 takes the most likely token.
      top_k: keeps the k most likely tokens; 0 keeps all.
      top_p: keeps the smallest set of likely tokens whose probability reaches p
        (arXiv 1904.09751).
      seed: the same seed chooses the same tokens.
      min_p: keeps tokens at least this fraction as likely as the most likely one
        (arXiv 2407.01082).
      repetition_penalty: divides positive logits of tokens that the prompt or text has, and
        multiplies negative ones (CTRL, arXiv 1909.05858, section 4.1); 1 changes nothing.
      presence_penalty: taken off the logits of tokens that the text has.
      frequency_penalty: taken off the logits of tokens once for each time the text has them.
      logit_bias: added to the logits, by token id.
      min_tokens: tokens before which no end token comes.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UserError(
                f"--temperature={self.temperature} must be at least 0 and finite: give e.g. 0.8."
            )
        if self.top_k < 0:
            raise UserError(f"--top_k={self.top_k} must be at least 0: give 0 to keep all.")
        if not 0 < self.top_p <= 1:
            raise UserError(
                f"--top_p={self.top_p} must be above 0 and at most 1: give 1 to keep all."
            )
        if self.seed < 0:
            raise UserError(
                f"--sampling_seed={self.seed} must be at least 0: leave it out for the default, 0."
            )
        if not 0 <= self.min_p <= 1:
            raise UserError(f"--min_p={self.min_p} must be from 0 to 1: give 0 to keep all.")
        if not 0 < self.repetition_penalty < math.inf:
            raise UserError(
                f"--repetition_penalty={self.repetition_penalty} must be above 0 and finite: give "
                "1 for none."
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise UserError(
                    f"--{name}={getattr(self, name)} must be a finite number: give 0 for none."
                )
        if not all(math.isfinite(bias) for bias in self.logit_bias.values()):
            raise UserError("a logit bias must be a finite number: leave out those that are not.")
        if self.min_tokens < 0:
            raise UserError(
                f"--min_tokens={self.min_tokens} must be at least 0: give 0 for no such limit."
            )


def probabilities(logits: np.ndarray, options: SamplingOptions) -> np.ndarray:
    """Returns the distribution (V,) float64 that the next token is drawn from.

    Filters come in the order temperature, top_k, top_p, min_p; penalties are not its matter.

    Args:
      logits: (V,) float; -inf where a token must not come.
      options: of the sampling.

    >>> probabilities(np.array([0.0, 0.0, -9.0]), SamplingOptions(top_k=2))
    array([0.5, 0.5, 0. ])
    """
    logits = np.asarray(logits, np.float64)
    best = int(np.argmax(logits))
    if options.temperature == 0:
        weights = np.zeros(len(logits))
        weights[best] = 1.0
        return weights
    # The gap is taken first: a tiny temperature then gives -inf, and no overflow on the way.
    with np.errstate(over="ignore"):
        scaled = (logits - logits[best]) / options.temperature
    weights = np.exp(scaled)
    if 0 < options.top_k < len(scaled):
        weights = _only(weights, _most_likely(weights, options.top_k))
    weights /= weights.sum()
    if options.top_p < 1:
        weights = _only(weights, _nucleus(weights, options.top_p))
    if options.min_p > 0:
        weights = np.where(weights < options.min_p * weights[best], 0.0, weights)
    return weights / weights.sum()


def _most_likely(weights: np.ndarray, count: int) -> np.ndarray:
    """Returns the `count` most likely ids, most likely first; of equal ones the lower first."""
    if count >= len(weights):
        return np.argsort(-weights, kind="stable")
    threshold = np.partition(weights, len(weights) - count)[len(weights) - count]
    above = np.flatnonzero(weights > threshold)
    ties = np.flatnonzero(weights == threshold)[: count - len(above)]
    chosen = np.sort(np.concatenate([above, ties]))
    return chosen[np.argsort(-weights[chosen], kind="stable")]


def _nucleus(weights: np.ndarray, top_p: float) -> np.ndarray:
    """Returns the fewest most likely tokens whose probabilities reach p."""
    for count in (_FEW, len(weights)):
        order = _most_likely(weights, count)
        reached = np.cumsum(weights[order])
        # The token that crosses p is kept: at least one always is.
        if reached[-1] >= top_p or len(order) == len(weights):
            return order[: int(np.searchsorted(reached, top_p)) + 1]
    raise AssertionError("all tokens together reach p")


def _only(weights: np.ndarray, kept: np.ndarray) -> np.ndarray:
    result = np.zeros_like(weights)
    result[kept] = weights[kept]
    return result


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """Returns the model's own log probabilities (V,) float64, before penalties and filters."""
    logits = np.asarray(logits, np.float64)
    largest = logits.max()
    return logits - (largest + np.log(np.exp(logits - largest).sum()))


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probabilities of one token and of those that were most likely in its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # most likely first


def token_logprobs(logits: np.ndarray, token: int, num_top: int) -> TokenLogprobs:
    """Returns the log probabilities that a choice is reported with.

    Args:
      logits: (V,).
      token: that was chosen.
      num_top: of the most likely ones.
    """
    logprobs = log_probabilities(logits)
    top = _most_likely(np.exp(logprobs), num_top) if num_top else np.empty(0, np.int64)
    return TokenLogprobs(
        int(token), float(logprobs[token]), tuple((int(t), float(logprobs[t])) for t in top)
    )


class Sampler:
    """Draws the tokens of one text; the n-th draw depends on the seed and n alone.

    Args:
      options: of the sampling.
      prompt: token ids that the repetition penalty counts too.
      end_tokens: which must not come before min_tokens.
      choice: of several texts of one request; each has its own draws.
    """

    def __init__(
        self,
        options: SamplingOptions,
        prompt: Sequence[int] = (),
        end_tokens: Sequence[int] = (),
        choice: int = 0,
    ) -> None:
        self._options = options
        seed = options.seed if choice == 0 else [options.seed, choice]
        self._random = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
        self._end_tokens = np.array(sorted(set(end_tokens)), np.int64)
        self._seen = set(prompt)
        self._counts: dict[int, int] = {}
        self._num_drawn = 0

    def choose(self, logits: np.ndarray) -> int:
        """Returns a token id for logits (V,)."""
        weights = probabilities(self.penalised(logits), self._options)
        cumulative = np.cumsum(weights)
        draw = self._random.random() * cumulative[-1]
        token = int(np.searchsorted(cumulative, draw, side="right"))
        if token >= len(weights):  # the draw was rounded up to the sum
            token = int(np.flatnonzero(weights)[-1])
        self._seen.add(token)
        self._counts[token] = self._counts.get(token, 0) + 1
        self._num_drawn += 1
        return token

    def penalised(self, logits: np.ndarray) -> np.ndarray:
        """Returns the logits (V,) float64 with penalties and biases."""
        options = self._options
        logits = np.array(logits, np.float64)
        if options.repetition_penalty != 1.0 and self._seen:
            ids = np.fromiter(self._seen, np.int64)
            values, penalty = logits[ids], options.repetition_penalty
            logits[ids] = np.where(values > 0, values / penalty, values * penalty)
        if self._counts and (options.presence_penalty or options.frequency_penalty):
            ids = np.fromiter(self._counts.keys(), np.int64)
            counts = np.fromiter(self._counts.values(), np.float64)
            logits[ids] -= options.presence_penalty + options.frequency_penalty * counts
        for token, bias in options.logit_bias.items():
            logits[token] += bias
        if self._num_drawn < options.min_tokens and self._end_tokens.size:
            rest = np.delete(logits, self._end_tokens)
            if np.isfinite(rest).any():  # a vocabulary of end tokens alone has no other choice
                logits[self._end_tokens] = -np.inf
        return logits
