"""The contract between a strategy and the training loop, which uses nothing else of a trainer."""

import abc
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from tfbig.checkpoint_format import Slice
from tfbig.config import Config, replace_fields
from tfbig.step_spans import Spans, no_spans

Batch = Mapping[str, tf.Tensor]


class StepResult(NamedTuple):
    """One optimizer update as tensors, global and equal on every rank."""

    loss_sum: tf.Tensor  # float64, over the global batch's valid tokens
    num_tokens: tf.Tensor  # float64
    source_loss_sum: tf.Tensor  # (num_sources,) float64
    source_num_tokens: tf.Tensor  # (num_sources,) float64
    grad_norm: tf.Tensor  # float32, of the mean gradient before clipping
    applied: tf.Tensor  # bool: whether the update was applied
    loss_scale: tf.Tensor  # float32: 1 except in float16
    signal: tf.Tensor  # int32: the largest `signal` any rank passed
    # float32: norms of the mean gradient of the embedding, each block and the head; (0,) unless
    # --layer_grad_norms asks for them
    layer_grad_norms: tf.Tensor


class Layout(NamedTuple):
    """How a model is cut over the ranks."""

    table: str  # to print
    record: dict[str, Any]  # the same, ready for JSON


class StateReader(Protocol):
    """What `load_state` needs of a checkpoint."""

    def has(self, path: str) -> bool: ...

    def read(
        self, path: str, start: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None
    ) -> np.ndarray: ...


class Trainer(abc.ABC):
    """How a step runs on this process's devices and with other processes.

    The constructor starts the engine (Horovod or tf.distribute, devices, threads, groups) and
    makes no variable. The attributes, `agree`, `gather`, `broadcast` and `barrier` work from then
    on; everything else after `build`. What a launcher has started wrongly, `trainers.start` finds.

    Attributes:
      config: of the run.
      rank: of this process.
      size: number of processes.
      local_rank: of this process among those of its host.
      local_size: number of those.
      data_rank: which slice of a global batch this process feeds.
      data_size: number of such slices.
      num_replicas: data_size x the devices one process drives.
      can_be_captured: whether TensorFlow's profiler may run over a step.
      holder: what holds a copy of the weights and is numbered by `differing_replicas`.
    """

    config: Config
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    data_rank: int = 0
    data_size: int = 1
    num_replicas: int = 1
    can_be_captured: bool = True
    holder: str = "rank"

    @property
    def whole_model(self) -> Any:
        """The model, after `build`, where this process holds all its weights; None elsewhere."""
        return None

    @abc.abstractmethod
    def __init__(self, config: Config) -> None: ...

    def set_attention(self, form: str) -> None:
        """Changes --attention; before `build`, alike on every rank."""
        self.config = replace_fields(self.config, {"attention": form})

    @abc.abstractmethod
    def agree(self, value: int, op: str) -> int:
        """Returns one small integer, the same on all ranks.

        Args:
          value: this rank's.
          op: "min", "max" or "sum".
        """

    @abc.abstractmethod
    def gather(self, values: np.ndarray) -> np.ndarray:
        """Returns all ranks' int64 vectors of one length, (ranks x length,) in order of rank.

        No GPU takes part: it also works where two ranks drive the same one.
        """

    @abc.abstractmethod
    def broadcast(self, array: np.ndarray) -> np.ndarray:
        """Returns rank 0's array; shape and dtype must be equal on all ranks."""

    @abc.abstractmethod
    def barrier(self, timeout: float) -> None:
        """Waits for all ranks.

        Args:
          timeout: seconds, after which TimeoutError is raised.
        """

    @abc.abstractmethod
    def build(self, training: bool = True, num_sources: int = 1, vocab_size: int = 0) -> None:
        """Makes this rank's variables; slots only when training.

        Args:
          training: whether train_step will be called.
          num_sources: sources of the data, the length of the per-source sums.
          vocab_size: true vocabulary, beyond which decode_step gives -inf; 0 means the model's.
        """

    @abc.abstractmethod
    def train_step(
        self, batch: Batch, step: int, learning_rate: float, max_loss: float, signal: int
    ) -> StepResult:
        """Makes one optimizer update from this process's slice of a global batch.

        Args:
          batch: tokens (b, S+1) int32, sample_index (b,) int64, source_index (b,) int32,
            loss_mask (b, S) uint8, and document_ids (b, S+1) int32 where stored.
          step: keys dropout; skipped updates consume steps too.
          learning_rate: of this step.
          max_loss: the update is skipped when the mean loss exceeds it; 0 means no limit.
          signal: 0 to 3; the result carries the maximum over ranks.
        """

    @abc.abstractmethod
    def gradient_slices(self, batch: Batch, step: int) -> list[Slice]:
        """Returns this rank's slices of a step's summed gradient, without making the step.

        float16's are multiplied by the loss scale.

        Args:
          batch: as for train_step.
          step: keys dropout.
        """

    @abc.abstractmethod
    def evaluate_step(
        self, batch: Batch, weights: str = "model"
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (loss_sum, num_tokens, num_correct) by row of the global batch, on every rank.

        Args:
          batch: as for train_step.
          weights: "model", or "ema" for the moving average of the weights.
        """

    @abc.abstractmethod
    def state_slices(self) -> Iterator[Slice]:
        """Yields this rank's weights, optimizer slots and scalars for a checkpoint."""

    @abc.abstractmethod
    def load_state(self, reader: StateReader, weights_only: bool = False) -> list[str]:
        """Fills this rank's variables from a checkpoint of any layout.

        Args:
          reader: of the checkpoint.
          weights_only: leaves the optimizer fresh.

        Returns:
          Paths that the checkpoint lacks and that keep their initial values.
        """

    @abc.abstractmethod
    def new_cache(self, num_rows: int, max_length: int) -> Any:
        """Returns an empty decode cache, local to the rank."""

    @abc.abstractmethod
    def decode_step(
        self,
        tokens: np.ndarray,
        num_valid: np.ndarray,
        source_row: np.ndarray,
        reset: np.ndarray,
        cache: Any,
    ) -> tuple[np.ndarray, Any]:
        """Feeds the next tokens of each row; called alike on every rank.

        Args:
          tokens: (B, N) int32.
          num_valid: (B,) int32, how many of a row's N tokens count; 0 leaves a row as it was.
          source_row: (B,) int32, the row whose cache each row goes on from.
          reset: (B,) bool, rows that begin anew.
          cache: of `new_cache` or the last call.

        Returns:
          (logits (B, V) float32 after each row's last token, cache).
        """

    def layout(self) -> Layout | None:
        """Returns how the model is cut over the ranks, None where each holds all of it."""
        return None

    def differing_replicas(self) -> list[tuple[str, list[int]]]:
        """Returns weights that differ where they must be the same, and the numbers of who differs.

        They number ranks or replicas, as `holder` says. Every rank calls it and gets the same;
        nothing where no one holds a copy of another's weights.
        """
        return []

    def timings(self) -> Callable[[], dict[str, float]]:
        """Returns a function that gives the last step's communication, without waiting for it now.

        The function gives, by mesh axis, the seconds in which a collective was in flight. It is
        called after the step's result has been read, perhaps when another step has begun.
        """
        return dict

    def spans(self) -> Callable[[], Spans]:
        """Returns a function that gives when the last step's parts ran, called as timings'.

        The function gives (n, 2) starts and stops, seconds since 1970, of collectives by mesh axis
        and, where the strategy drives them one by one, of "forward" and "backward" passes.
        """
        return no_spans

    def stalled(self) -> list[str]:
        """Returns what is known of collectives that wait for ranks, a line each.

        A watchdog's thread calls it when nothing moves any more; it may take a minute.
        """
        return []

    def close(self) -> None:  # noqa: B027 - most strategies have nothing to close
        """Shuts the engine down; another Trainer can be built in the same process."""
