"""Loss, perplexity, bits per byte and accuracy over a whole split, on all ranks together."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np


class EvaluationStopped(Exception):
    """A rank was told to stop in the middle of an evaluation."""


def evaluate(
    trainer: Any,
    batches: Iterable[Any],
    num_bytes: int,
    weights: str = "model",
    before_batch: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Returns the measures of a split; every rank calls this and gets the same numbers.

    Args:
      trainer: built, of any strategy.
      batches: this process's slices of the split's global batches; rows that fill the last one up
        have no valid token.
      num_bytes: of text that the split's labels stand for; 0 leaves bits per byte out.
      weights: "model" or "ema".
      before_batch: called before each batch; what it raises ends the evaluation.

    Returns:
      loss (mean over tokens, nats), perplexity, accuracy (of the most likely next token),
      num_tokens, and bits_per_byte.
    """
    totals = np.zeros(3)  # loss_sum, num_tokens, num_correct
    for batch in batches:
        before_batch()
        totals += [np.sum(rows, dtype=np.float64) for rows in trainer.evaluate_step(batch, weights)]
    return measures_of(totals, num_bytes)


def totals_by_source(
    trainer: Any, batches: Iterable[Any], row_sources: Iterable[np.ndarray], num_sources: int
) -> np.ndarray:
    """Returns (num_sources, 3) float64: loss sum, tokens and correct ones of each source.

    Args:
      trainer: built, of any strategy.
      batches: as for `evaluate`.
      row_sources: the source of each row of each global batch.
      num_sources: of the data.
    """
    totals = np.zeros((num_sources, 3))
    for batch, sources in zip(batches, row_sources, strict=True):
        rows = np.stack(trainer.evaluate_step(batch), axis=1)  # (global batch, 3)
        np.add.at(totals, sources, rows.astype(np.float64))
    return totals


def measures_of(totals: np.ndarray, num_bytes: int) -> dict[str, float]:
    """Returns the measures of sums over any set of rows.

    Args:
      totals: (3,) loss sum, tokens, correct ones.
      num_bytes: of text that the labels stand for; 0 leaves bits per byte out.

    >>> measures_of(np.array([0.0, 2.0, 1.0]), 0)["accuracy"]
    0.5
    """
    loss_sum, num_tokens, num_correct = (float(total) for total in totals)
    loss = loss_sum / num_tokens if num_tokens else math.nan
    measures = {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "accuracy": num_correct / num_tokens if num_tokens else math.nan,
        "num_tokens": num_tokens,
    }
    if num_bytes:
        measures["bits_per_byte"] = loss_sum / math.log(2) / num_bytes
    return measures
