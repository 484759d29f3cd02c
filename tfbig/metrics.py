"""One training step as a record of metrics.jsonl. TensorFlow-free."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfbig.config import Config, flops_per_token
from tfbig.recomputation_mode import group_size


@dataclass(frozen=True)
class Throughput:
    """What turns a step's seconds into rates.

    Args:
      tokens_per_step: positions that all ranks compute in one step.
      flops_per_token: model FLOPs, forward and backward.
      peak_flops: of all devices together, FLOP/s; 0 if unknown.
      recomputed_flops_per_token: what --activation_checkpointing makes again.
    """

    tokens_per_step: int
    flops_per_token: float
    peak_flops: float
    recomputed_flops_per_token: float = 0.0

    @classmethod
    def of(cls, config: Config, peak_flops: float) -> "Throughput":
        """Returns the rates' constants of a run."""
        length = config.data.sequence_length
        return cls(
            config.run.global_batch * length,
            flops_per_token(config.model, length),
            peak_flops,
            recomputed_flops_per_token(config),
        )

    def at_batch(self, share: float) -> "Throughput":
        """Returns the rates' constants of a step with a share of the full batch."""
        return dataclasses.replace(self, tokens_per_step=round(self.tokens_per_step * share))

    def model_flops_utilisation(self, seconds: float) -> float | None:
        """Returns MFU as PaLM defines it (arXiv 2204.02311), or None where the peak is unknown."""
        return self._utilisation(self.flops_per_token, seconds)

    def hardware_flops_utilisation(self, seconds: float) -> float | None:
        """Returns HFU, which counts recomputation besides, or None where the peak is unknown."""
        return self._utilisation(self.flops_per_token + self.recomputed_flops_per_token, seconds)

    def _utilisation(self, flops: float, seconds: float) -> float | None:
        if not self.peak_flops or seconds <= 0:
            return None
        return self.tokens_per_step * flops / seconds / self.peak_flops


def recomputed_flops_per_token(config: Config) -> float:
    """Returns the FLOPs of forward products that the backward pass makes again, a token.

    Of checkpointed blocks all, of `attention` the scores; both by the whole attention square, as
    the model's own are counted.
    """
    model, mode = config.model, config.parallel.activation_checkpointing
    scores = 2.0 * config.data.sequence_length * model.num_heads * model.attention_head_dim
    if mode == "attention":
        return model.num_layers * scores
    if not group_size(mode):
        return 0.0
    head = 6.0 * model.vocab_size * model.embed_dim  # forward, and twice as much backward
    return (flops_per_token(model, config.data.sequence_length) - head) / 3


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step, on this rank.

    Args:
      step: wall time.
      data_wait: waiting for the batch.
      communication: by mesh axis, seconds in which a collective was in flight; these overlap with
        compute where the engine allows.
    """

    step: float
    data_wait: float
    communication: Mapping[str, float]

    def as_tuple(self) -> tuple[float, float, Mapping[str, float]]:
        """Returns (step, data_wait, communication)."""
        return self.step, self.data_wait, self.communication


def train_record(
    step: int,
    consumed_samples: int,
    learning_rate: float,
    result: Any,
    times: StepTimes,
    throughput: Throughput,
    peak_memory_bytes: int,
    sources: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns the record of one optimizer update.

    Args:
      step: updates made, this one included.
      consumed_samples: of the stream, this step's included.
      learning_rate: of this step.
      result: the trainer's StepResult.
      times: of this step.
      throughput: the run's constants.
      peak_memory_bytes: of this rank so far.
      sources: names, in the order of the result's sums.
    """
    num_tokens = float(result.num_tokens)
    source_tokens = np.asarray(result.source_num_tokens)
    source_loss = np.asarray(result.source_loss_sum) / np.maximum(source_tokens, 1)
    utilisation = throughput.model_flops_utilisation(times.step)
    communication = sum(times.communication.values())
    record = {
        "kind": "train",
        "step": step,
        "time": time.time(),
        "consumed_samples": consumed_samples,
        "loss": float(result.loss_sum) / num_tokens if num_tokens else float("nan"),
        "num_tokens": num_tokens,
        "sources": list(sources),
        "source_loss": source_loss.tolist(),
        "source_num_tokens": source_tokens.tolist(),
        "learning_rate": learning_rate,
        "grad_norm": float(result.grad_norm),
        "loss_scale": float(result.loss_scale),
        "applied": bool(result.applied),
        "tokens_per_second": throughput.tokens_per_step / times.step if times.step else 0.0,
        "step_seconds": times.step,
        "data_wait_seconds": times.data_wait,
        "compute_seconds": max(0.0, times.step - times.data_wait - communication),
        "communication_seconds": dict(times.communication),
        "slowest_rank": None,  # of several: see heartbeat.slowest_rank
        "mfu": utilisation,
        "hfu": throughput.hardware_flops_utilisation(times.step),
        "peak_flops": throughput.peak_flops,
        "peak_memory_bytes": peak_memory_bytes,
    }
    norms = np.asarray(result.layer_grad_norms).tolist()
    if norms:
        record["layer_grad_norms"] = {
            "embedding": norms[0],
            "transformer_blocks": norms[1:-1],
            "head": norms[-1],
        }
    return record


def source_scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns loss and tokens of each source that a training step saw, by name.

    Nothing where the data has one source: its loss is the step's.

    >>> sums = {"source_loss": [2.5, 0.0], "source_num_tokens": [64.0, 0.0]}
    >>> source_scalars({"sources": ["a", "b"], **sums})
    {'source_loss/a': 2.5, 'source_num_tokens/a': 64.0}
    """
    names = record.get("sources", ())
    if len(names) < 2:
        return {}
    columns = names, record["source_loss"], record["source_num_tokens"]
    seen = [(name, loss, tokens) for name, loss, tokens in zip(*columns, strict=True) if tokens]
    return {
        key: value
        for name, loss, tokens in seen
        for key, value in ((f"source_loss/{name}", loss), (f"source_num_tokens/{name}", tokens))
    }
