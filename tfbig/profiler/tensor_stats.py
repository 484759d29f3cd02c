"""The hook that notes statistics of weights, gradients and activations every so many steps."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from tfbig.loop import Hook
from tfbig.profiler import layout
from tfbig.profiler.activations import activation_records
from tfbig.profiler.tensor_statistics import change_of, statistics_of

_SLOT = "optimizer/m/"  # AdamW's first moment: a moving average of the gradient


class TensorStatsHook(Hook):
    """Writes statistics of this rank's tensors; keeps one more copy of its weights on the host.

    A disk that refuses them ends the writing, with one line, and never the run.

    Args:
      profiler_dir: of the run.
      trainer: built.
      every: steps between two looks.
      histograms: folder of TensorBoard's files for histograms; None writes none.
    """

    def __init__(
        self, profiler_dir: Path, trainer: Any, every: int, histograms: Path | None
    ) -> None:
        self._trainer, self._every = trainer, every
        self._path = layout.rank_path(profiler_dir, "tensors", trainer.rank, ".jsonl")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._before: dict[str, np.ndarray] = {}
        self._batch: Any = None
        self._writer: Any = None
        self._healthy = True
        if histograms is not None:
            import tensorflow as tf

            self._writer = tf.summary.create_file_writer(str(histograms))

    def samples(self, step: int) -> bool:
        return self._healthy and (step % self._every == 0 or step == 1)

    def on_sample_begin(self, step: int) -> None:
        self._before = {path: array for path, kind, array in self._tensors() if kind == "weight"}

    def on_sample_batch(self, batch: Any) -> None:
        self._batch = batch

    def on_sample_end(self, step: int) -> None:
        lines = []
        if self._trainer.whole_model is not None and self._trainer.rank == 0:
            records = activation_records(self._trainer.whole_model, self._batch)
            lines += [orjson.dumps({"step": step, **record}) for record in records]
        for path, kind, array in self._tensors():
            record: dict[str, Any] = {"step": step, "name": path, "kind": kind}
            record |= statistics_of(array)
            if path in self._before and kind == "weight":
                record |= change_of(self._before[path], array)
            lines.append(orjson.dumps(record))
            if self._writer is not None:
                self._write_histogram(f"{kind}/{path}", array, step)
        self._before, self._batch = {}, None
        try:
            with open(self._path, "ab") as file:
                file.write(b"\n".join(lines) + b"\n")
        except OSError as error:
            self._healthy = False
            print(f"warning: no more tensors are looked at: {error}", file=sys.stderr, flush=True)
        if self._writer is not None:
            self._writer.flush()

    def _tensors(self) -> Iterator[tuple[str, str, np.ndarray]]:
        """Yields (path, kind, values) of the tensors that this rank writes to checkpoints."""
        for part in self._trainer.state_slices():
            kind = _kind_of(part.path)
            if kind and part.is_writer:
                yield part.path.removeprefix(_SLOT), kind, np.asarray(part.array)

    def _write_histogram(self, name: str, array: np.ndarray, step: int) -> None:
        import tensorflow as tf

        finite = array[np.isfinite(array)]
        if finite.size:
            with self._writer.as_default(step=step):
                tf.summary.histogram(name, finite)


def _kind_of(path: str) -> str:
    if path.startswith(_SLOT):
        return "gradient"
    return "" if path.startswith(("optimizer/", "ema/")) else "weight"
