"""A model cut over ranks behind one server: rank 0 decides what is computed, the others follow.

TensorFlow-free: the trainer's broadcast is all that talks.
"""

import contextlib
import enum
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np

# How often rank 0 says something when there is nothing to write: Horovod reports a rank that waits
# for another one a minute long.
IDLE_SECONDS = 5.0


class _Order(enum.IntEnum):
    IDLE = 0
    NEW_CACHE = 1  # rows, length
    DECODE = 2  # rows, tokens of a row
    END = 3


class LeadingTrainer:
    """Rank 0's trainer: what it is asked to compute, it first tells the other ranks.

    What fails here may have left the others in the middle of it, so the process ends, and the
    launcher ends the job.

    Args:
      trainer: built, with weights in it, on a layout of several ranks.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        # One order and what belongs to it, then the next; at the end two threads give some.
        self._lock = threading.Lock()

    def new_cache(self, num_rows: int, max_length: int) -> Any:
        """Makes an empty cache on every rank."""
        with self._ordered(_Order.NEW_CACHE, num_rows, max_length):
            return self._trainer.new_cache(num_rows, max_length)

    def decode_step(
        self,
        tokens: np.ndarray,
        num_valid: np.ndarray,
        source_row: np.ndarray,
        reset: np.ndarray,
        cache: Any,
    ) -> tuple[np.ndarray, Any]:
        """Feeds tokens on every rank; see Trainer.decode_step."""
        with self._ordered(_Order.DECODE, *tokens.shape):
            parts = [tokens.ravel(), num_valid, source_row, reset]  # (B * N,), three of (B,)
            self._trainer.broadcast(np.concatenate([part.astype(np.int32) for part in parts]))
            return self._trainer.decode_step(tokens, num_valid, source_row, reset, cache)

    def rest(self) -> None:
        """Says that there is nothing to do; at least every IDLE_SECONDS."""
        with self._ordered(_Order.IDLE):
            pass

    def close(self) -> None:
        """Ends the other ranks, too."""
        with self._ordered(_Order.END):
            self._trainer.close()

    @contextlib.contextmanager
    def _ordered(self, order: _Order, first: int = 0, second: int = 0) -> Iterator[None]:
        """Tells the others what rank 0 computes within; a failure there ends this process."""
        with self._lock:
            try:
                self._trainer.broadcast(np.array([order, first, second], np.int32))
                yield
            except Exception:
                traceback.print_exc()
                print("error: a rank failed, which ends the server on all.", file=sys.stderr)
                sys.stderr.flush()
                os._exit(1)


def follow(trainer: Any) -> None:
    """Computes what rank 0 computes until it ends.

    Args:
      trainer: built, with weights in it; of any rank but the first.
    """
    cache = None
    while True:
        code, num_rows, width = trainer.broadcast(np.zeros(3, np.int32)).tolist()
        if code == _Order.END:
            trainer.close()
            return
        if code == _Order.NEW_CACHE:
            cache = trainer.new_cache(num_rows, width)
        elif code == _Order.DECODE:
            flat = trainer.broadcast(np.zeros(num_rows * (width + 3), np.int32))
            tokens = flat[: num_rows * width].reshape(num_rows, width)  # (B, N)
            num_valid, source_row, reset = flat[num_rows * width :].reshape(3, num_rows)  # (B,)
            _, cache = trainer.decode_step(tokens, num_valid, source_row, reset.astype(bool), cache)
