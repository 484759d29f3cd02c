"""Follows a pipeline rank's program: passes through its chunks, exchanges with its neighbours."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from trainers.base import Batch
from trainers.gradients import BatchSums
from trainers.pipeline_link import Intervals, Link
from trainers.pipeline_program import Exchange, Message, Program
from trainers.pipeline_stage import Chunk


class Stepper:
    """Runs programs on this rank's chunks.

    Args:
      chunks: of this rank, in order.
      links: to the other pipeline ranks, by their place.
    """

    def __init__(self, chunks: Sequence[Chunk], links: Mapping[int, Link]) -> None:
        self._chunks, self._links = chunks, links
        self.intervals: list[Intervals] = []
        self.seconds = {"forward": 0.0, "backward": 0.0}
        # When each pass ran, seconds since 1970.
        self.passes: dict[str, list[tuple[float, float]]] = {"forward": [], "backward": []}

    def run(
        self,
        program: Program,
        batch: Batch,
        step: tf.Tensor,
        shape: Sequence[int],
        training: bool,
        loss_scale: tf.Tensor | None = None,
        weights: Mapping[str, tf.Variable] | None = None,
    ) -> list[BatchSums]:
        """Returns the loss sums by microbatch on the last stage, nothing on the others.

        Args:
          program: this rank's.
          batch: this rank's copy of the batch.
          step: scalar int64.
          shape: (b, T, D) of a hidden state between stages.
          training: whether the program has backward passes.
          loss_scale: what the gradients are multiplied by; None means 1.
          weights: stand in for the model's variables, by path.
        """
        num_microbatches = 1 + max(
            action.microbatch for action in program.actions if not isinstance(action, Exchange)
        )
        sums: list[BatchSums] = []

        def work(action: Any, value: tf.Tensor | None) -> tf.Tensor | None:
            chunk = self._chunks[action.chunk]
            if action.kind == "backward":
                upstream = loss_scale if value is None else value
                return chunk.backward(action.microbatch, upstream)
            if training:
                result = chunk.forward(value, batch, action.microbatch, num_microbatches, step)
            else:
                result = chunk.evaluate(value, batch, action.microbatch, num_microbatches)
            if isinstance(result, BatchSums):
                sums.append(result)
                return None
            return result

        for chunk in self._chunks:
            chunk.begin(weights and {p: weights.get(p, v) for p, v in chunk.variables.items()})
        self._follow(program, shape, work)
        for chunk in self._chunks:
            chunk.end()
        return sums

    def decode(
        self,
        program: Program,
        shape: Sequence[int],
        run: Callable[[int, tf.Tensor | None], tf.Tensor],
    ) -> tf.Tensor | None:
        """Returns the last stage's logits (R, V of this rank); None on the others.

        Args:
          program: this rank's, of one forward pass.
          shape: (b, N, D) of a hidden state between stages.
          run: takes a chunk's number and the hidden state that enters it, None for the first.
        """
        last = program.num_ranks * program.num_chunks - 1
        logits: list[tf.Tensor] = []

        def work(action: Any, value: tf.Tensor | None) -> tf.Tensor | None:
            result = run(action.chunk, value)
            if action.chunk * program.num_ranks + program.rank == last:
                logits.append(result)
                return None
            return result

        self._follow(program, shape, work)
        return logits[0] if logits else None

    def _follow(self, program: Program, shape: Sequence[int], work: Any) -> None:
        received: dict[Message, tf.Tensor] = {}
        made: dict[Message, tf.Tensor] = {}
        self.intervals = []
        self.seconds = {"forward": 0.0, "backward": 0.0}
        self.passes = {"forward": [], "backward": []}
        for action in program.actions:
            if isinstance(action, Exchange):
                send = made.pop(action.send) if action.send else None
                value, intervals = self._links[action.peer].exchange(
                    send, action.receive is not None, shape
                )
                self.intervals.append(intervals)
                if action.receive:
                    received[action.receive] = value
                continue
            start = time.perf_counter()
            stage = action.chunk * program.num_ranks + program.rank
            message = Message(action.kind, stage, action.microbatch)
            result = work(action, received.pop(message, None))
            if result is not None:
                following = stage + (1 if action.kind == "forward" else -1)
                made[Message(action.kind, following, action.microbatch)] = result
            seconds = time.perf_counter() - start
            self.seconds[action.kind] += seconds
            now = time.time()
            self.passes[action.kind].append((now - seconds, now))
        assert not received and not made, "a message was left over"
