"""A run's state in a new world: one rank holds it, all of them get it. TensorFlow-free."""

from dataclasses import asdict
from typing import Any

import numpy as np
import orjson

from tfbig.elastic.standing import Kept, Standing

_NO_STEP = 2**62


class ReceivedState:
    """A run's state that one rank holds and all ranks read together, as a checkpoint's reader.

    Its methods are called alike on every rank.

    Args:
      trainer: its `rank`, `agree` and `broadcast` are used.
      root: the rank that holds it.
      kept: on that rank, else whatever this one holds.

    Attributes:
      standing: the root's.
      step: of the state.
      manifest: what callers ask of a checkpoint's.
    """

    def __init__(self, trainer: Any, root: int, kept: Kept | None) -> None:
        self._trainer, self._root = trainer, root
        self._kept = kept if trainer.rank == root else None
        own = None
        if self._kept is not None:
            own = {"standing": asdict(self._kept.standing), "shapes": self._kept.shapes}
        told = self._broadcast_json(own)
        self.standing = Standing(**told["standing"])
        self._shapes: dict[str, Any] = told["shapes"]
        self.step = self.standing.step
        self.manifest = {
            "consumed_samples": self.standing.consumed_samples,
            "metadata": {"recent_losses": self.standing.recent_losses},
        }

    def has(self, path: str) -> bool:
        """Returns whether the state holds a variable."""
        return path in self._shapes

    def read(
        self, path: str, start: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None
    ) -> np.ndarray:
        """Returns a whole variable's values, the same on every rank."""
        assert start is None and shape is None, "elastic runs hold whole variables"
        whole, dtype = self._shapes[path]
        held = self._kept.read(path) if self._kept else np.zeros(whole, dtype)
        return self._trainer.broadcast(held, self._root).reshape(whole)

    def _broadcast_json(self, value: Any) -> Any:
        text = b"" if value is None else orjson.dumps(value)
        length = self._trainer.agree(len(text), "max")
        padded = np.frombuffer(text.ljust(length), np.uint8)
        return orjson.loads(self._trainer.broadcast(padded, self._root).tobytes())


def received(trainer: Any, kept: Kept | None) -> ReceivedState | None:
    """Returns the state that the new world goes on from; None where no rank holds one.

    Where ranks were torn apart within a step, some may have made it and others not: the older
    state holds, and the step is made again by all.

    Args:
      trainer: its `rank`, `size`, `agree` and `broadcast` are used; called on every rank.
      kept: what this rank holds.
    """
    holds = kept is not None and kept.standing.step >= 0
    own = kept.standing.step if kept is not None and holds else _NO_STEP
    oldest = trainer.agree(own, "min")
    if oldest == _NO_STEP:
        return None
    root = trainer.agree(trainer.rank if own == oldest else trainer.size, "min")
    return ReceivedState(trainer, root, kept)
