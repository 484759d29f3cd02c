"""The hook that notices when TensorFlow traces functions in the middle of a run."""

import collections
import statistics
import sys
from pathlib import Path
from typing import Any

import orjson

from tfbig.loop import Hook
from tfbig.profiler import layout
from tfbig.step_spans import StepSpans

_FACTOR = 1.5  # times the usual step that one with a compilation takes at least


class CompilationHook(Hook):
    """Notes steps during which functions were made, and what that cost.

    Args:
      profiler_dir: of the run.
      rank: of this process.
    """

    def __init__(self, profiler_dir: Path, rank: int) -> None:
        from tensorflow.python.eager import context

        self._context = context.context()
        self._path, self._rank = (
            layout.rank_path(profiler_dir, "compilations", rank, ".jsonl"),
            rank,
        )
        self._recent: collections.deque[float] = collections.deque(maxlen=20)
        self._known, self._new, self._steps_to_look = 0, 0, 0

    def on_compiled(self, seconds: float) -> None:
        self._known = self._count()

    def on_evaluation(self, record: dict[str, Any]) -> None:
        self._known = self._count()  # evaluating has functions of its own

    def on_checkpoint(self, step: int, seconds: float) -> None:
        self._known = self._count()

    def on_spans(self, spans: StepSpans) -> None:
        count = self._count()
        if count > self._known:
            # The next step may be launched already: then it is the one that traced.
            self._new, self._steps_to_look, self._known = count - self._known, 2, count
        usual = statistics.median(self._recent) if self._recent else spans.seconds
        if self._steps_to_look:
            self._steps_to_look -= 1
            if len(self._recent) >= 2 and spans.seconds > _FACTOR * usual:
                self._note(spans.step, spans.seconds - usual)
                self._steps_to_look = 0
                return
        self._recent.append(spans.seconds)

    def _note(self, step: int, seconds: float) -> None:
        record = {"rank": self._rank, "step": step, "seconds": seconds, "functions": self._new}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "ab") as file:
                file.write(orjson.dumps(record) + b"\n")
        except OSError as error:  # the run goes on, as without its other measurements
            print(f"warning: a compilation is not noted: {error}", file=sys.stderr, flush=True)

    def _count(self) -> int:
        return len(self._context.list_function_names())
