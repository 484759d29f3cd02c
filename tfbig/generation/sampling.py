"""Choosing the next token from logits. TensorFlow-free."""

from dataclasses import dataclass

import numpy as np

from tfbig.errors import UserError


@dataclass(frozen=True)
class SamplingOptions:
    """How a token is chosen.

    Args:
      temperature: divides the logits; 0 takes the most likely token.
      top_k: keeps the k most likely tokens; 0 keeps all.
      top_p: keeps the smallest set of likely tokens whose probability reaches p
        (arXiv 1904.09751).
      seed: the same seed chooses the same tokens.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < np.inf:
            raise UserError(f"--temperature={self.temperature} must be at least 0.")
        if self.top_k < 0:
            raise UserError(f"--top_k={self.top_k} must be at least 0.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top_p={self.top_p} must be above 0 and at most 1.")
        if self.seed < 0:
            raise UserError(f"--sampling_seed={self.seed} must be at least 0.")


def probabilities(logits: np.ndarray, options: SamplingOptions) -> np.ndarray:
    """Returns the distribution (V,) float64 that the next token is drawn from.

    Args:
      logits: (V,) float; -inf where a token must not come.
      options: of the sampling.

    >>> probabilities(np.array([0.0, 0.0, -9.0]), SamplingOptions(top_k=2))
    array([0.5, 0.5, 0. ])
    """
    logits = np.asarray(logits, np.float64)
    if options.temperature == 0:
        return np.eye(len(logits))[int(np.argmax(logits))]
    scaled = (logits - logits.max()) / options.temperature
    if 0 < options.top_k < len(scaled):
        kept = np.argsort(-scaled, kind="stable")[: options.top_k]
        scaled = _only(scaled, kept)
    weights = np.exp(scaled)
    weights /= weights.sum()
    if options.top_p < 1:
        order = np.argsort(-weights, kind="stable")
        # The token that crosses p is kept: at least one always is.
        before = np.cumsum(weights[order]) - weights[order]
        weights = np.where(
            np.isin(np.arange(len(weights)), order[before < options.top_p]), weights, 0
        )
        weights /= weights.sum()
    return weights


def _only(scaled: np.ndarray, kept: np.ndarray) -> np.ndarray:
    result = np.full_like(scaled, -np.inf)
    result[kept] = scaled[kept]
    return result


class Sampler:
    """Draws tokens; the n-th draw depends on the seed and n alone.

    Args:
      options: of the sampling.
    """

    def __init__(self, options: SamplingOptions) -> None:
        self._options = options
        self._random = np.random.Generator(np.random.Philox(options.seed))

    def choose(self, logits: np.ndarray) -> int:
        """Returns a token id for logits (V,)."""
        cumulative = np.cumsum(probabilities(logits, self._options))
        draw = self._random.random() * cumulative[-1]
        return int(np.searchsorted(cumulative, draw, side="right"))
