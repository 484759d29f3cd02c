"""The hook that captures chosen steps operation by operation, as XPlane files."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import orjson

from tfbig.loop import Hook
from tfbig.profiler import layout
from tfbig.profiler.xplane import summary_of
from tfbig.step_spans import StepSpans

STEP_EVENT = "tfbig_step"


class CaptureHook(Hook):
    """Captures steps with TensorFlow's profiler and notes what each was made of.

    The loop runs a sampled step alone: it waits for the step before, and reads its result before
    the next one begins, so that the capture holds the step and nothing else.

    Args:
      profiler_dir: of the run.
      rank: of this process.
      steps: to capture.
    """

    def __init__(self, profiler_dir: Path, rank: int, steps: Sequence[range]) -> None:
        self._profiler_dir, self._rank, self._steps = profiler_dir, rank, steps
        self._summary_path = layout.rank_path(profiler_dir, "captures", rank, ".jsonl")
        self._folder: Path | None = None
        self._spans: StepSpans | None = None
        self._healthy = True

    def samples(self, step: int) -> bool:
        return self._healthy and any(step in chosen for chosen in self._steps)

    def on_sample_begin(self, step: int) -> None:
        import tensorflow as tf

        folder = layout.capture_dir(self._profiler_dir, step, self._rank, time.time())
        options = tf.profiler.experimental.ProfilerOptions(
            host_tracer_level=2, python_tracer_level=0, device_tracer_level=1
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tf.profiler.experimental.start(str(folder), options=options)
        except (OSError, tf.errors.OpError) as error:  # another capture runs in this process
            self._give_up(error)
            return
        self._folder = folder
        self._trace = tf.profiler.experimental.Trace(STEP_EVENT, step_num=step, _r=1)
        self._begin = time.time()
        self._trace.__enter__()

    def on_spans(self, spans: StepSpans) -> None:
        self._spans = spans

    def on_sample_end(self, step: int) -> None:
        if (folder := self._stop()) is not None:
            try:
                self._note(folder, step)
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        """Ends a capture whose step failed: a process has one profiler, the next run needs it."""
        self._stop()

    def _stop(self) -> Path | None:
        """Ends the capture under way; returns its folder, None where nothing was captured."""
        if self._folder is None:
            return None
        import tensorflow as tf

        folder, self._folder = self._folder, None
        self._trace.__exit__(None, None, None)
        try:
            tf.profiler.experimental.stop()
        except (OSError, tf.errors.OpError) as error:
            self._give_up(error)
            return None
        return folder

    def _note(self, folder: Path, step: int) -> None:
        captures = sorted(folder.rglob("*.xplane.pb"))
        if not captures or self._spans is None or self._spans.step != step:
            return
        summary = summary_of(captures[-1], STEP_EVENT, self._begin, self._spans)
        if summary is None:
            return
        self._summary_path.parent.mkdir(parents=True, exist_ok=True)
        path = captures[-1].relative_to(self._profiler_dir)
        record = {"step": step, "rank": self._rank, "capture": str(path), **summary}
        with open(self._summary_path, "ab") as file:
            file.write(orjson.dumps(record) + b"\n")

    def _give_up(self, error: Exception) -> None:
        self._healthy = False
        reason = " ".join(str(error).split())
        print(f"warning: no more steps are captured: {reason}", file=sys.stderr, flush=True)
