"""The samples of one step, by position and source, the worst first."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfbig.config import Config
from tfbig.schedule import global_batch

NUM_WORST = 8  # samples that an event names one by one


def examine_step(
    config: Config, trainer: Any, data: Any, first_sample: int, batch: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns what is known of a step's samples; called on every rank, for a collective.

    Args:
      config: the run.
      trainer: built; its weights give each sample's loss, without dropout.
      data: whose samples they are.
      first_sample: the step's first position in the stream.
      batch: this process's slice of them.

    Returns:
      first_sample, last_sample, sources (samples by source), worst (samples of the highest loss,
      or of one that isn't finite: sample, source, loss).
    """
    # Behind them are rows that only fill slices up.
    num_samples = global_batch(config.run, first_sample)
    losses = losses_by_position(config, trainer, batch)[:num_samples]
    positions = first_sample + np.arange(len(losses), dtype=np.int64)
    index = data.rows("train", positions, config.run.seed)["source_index"]
    sources = [data.sources[number] for number in index]
    # NaN sorts last, as the worst.
    worst = np.argsort(np.where(np.isfinite(losses), losses, np.nan), kind="stable")[::-1]
    return {
        "first_sample": first_sample,
        "last_sample": first_sample + len(losses) - 1,
        "sources": dict(Counter(sources)),
        "worst": [
            {
                "sample": int(positions[row]),
                "source": sources[row],
                # Words where JSON has no number.
                "loss": float(losses[row]) if np.isfinite(losses[row]) else str(losses[row]),
            }
            for row in worst[:NUM_WORST]
        ],
    }


def losses_by_position(config: Config, trainer: Any, batch: Mapping[str, Any]) -> np.ndarray:
    """Returns the mean loss of every sample of a global batch, in the stream's order.

    Args:
      config: its microbatches bound the memory.
      trainer: built.
      batch: this process's slice, of (b, S+1) tokens.
    """
    num_rows = int(batch["tokens"].shape[0])
    num_parts = config.parallel.microbatches
    size = num_rows // num_parts
    parts = []
    for number in range(num_parts):
        part = {name: value[number * size : (number + 1) * size] for name, value in batch.items()}
        loss, num_tokens, _ = trainer.evaluate_step(part)  # (ranks x size,)
        with np.errstate(invalid="ignore"):
            means = loss / np.maximum(num_tokens, 1)
        parts.append(means.reshape([-1, size]))  # (ranks, size)
    return np.concatenate(parts, axis=1).reshape(-1)  # rank r's rows are one stretch
