"""Models larger than one device: any mesh of data, pipeline and tensor parallelism on Horovod."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfbig.checkpoint_format import LazyArray, Slice
from tfbig.config import Config
from tfbig.model.gpt import GPT
from tfbig.optimizer import Optimizer, decide, squared_norm
from tfbig.variables import variable_rule
from trainers.base import Batch, StateReader, StepResult, Trainer
from trainers.collectives import Clock, Engine, Group, seconds_in_flight
from trainers.devices import prepare_devices
from trainers.gradients import BatchSums
from trainers.mesh import make_mesh
from trainers.partition import even_partition
from trainers.pipeline_link import Link
from trainers.pipeline_program import Exchange, Message, plan_programs
from trainers.pipeline_schedule import compute_order
from trainers.pipeline_stage import Chunk

NUM_SIGNALS = 4
TOKEN_TABLE = "embedding_layer/token_emb/embeddings"


class PipelineTrainer(Trainer):
    """Trains one stage of the model in each process."""

    def __init__(self, config: Config) -> None:
        self.config = config
        parallel = config.parallel
        import os

        world = int(os.environ.get("HOROVOD_SIZE", "1"))
        self.mesh = make_mesh(
            world,
            parallel.pipeline_parallel_degree,
            parallel.tensor_parallel_degree,
            parallel.placement_strategy,
        )
        groups = []
        for line in self.mesh.lines("pipeline"):
            groups += [("pipeline", pair) for pair in zip(line[:-1], line[1:], strict=True)]
            groups.append(("tied", (line[0], line[-1])) if len(line) > 1 else ("tied", line))
        groups += [("data", line) for line in self.mesh.lines("data")]
        self._engine = Engine(groups, parallel.deterministic)
        self.rank, self.size = self._engine.rank, self._engine.size
        self.places = self.mesh.coordinates(self.rank)
        self.data_rank = self.places["data"]
        self.data_size = self.num_replicas = self.mesh.sizes["data"]
        self._groups = {}
        self._pairs: dict[int, Group] = {}
        for group in self._engine.groups:
            if group.rank < 0:
                continue
            if group.axis == "pipeline":
                peer = group.ranks[1 - group.rank]
                self._pairs[self.mesh.coordinates(peer)["pipeline"]] = group
            else:
                self._groups[group.axis] = group
        prepare_devices(parallel, self._engine.local_rank, self._engine.local_size)

    def agree(self, value: int, op: str) -> int:
        return self._engine.agree(value, op)

    def broadcast(self, array: np.ndarray) -> np.ndarray:
        return self._engine.broadcast(array)

    def barrier(self, timeout: float) -> None:
        self._engine.barrier(timeout)

    def close(self) -> None:
        self._engine.close()

    def build(self, training: bool = True, num_sources: int = 1, vocab_size: int = 0) -> None:
        config = self.config
        self._num_sources = num_sources
        self._place, degree = self.places["pipeline"], self.mesh.sizes["pipeline"]
        self.partition = even_partition(config.model.num_layers, degree)
        model = GPT.from_config(
            config.model,
            self.partition[self._place],
            seed=config.run.seed,
            precision=config.parallel.precision,
        )
        microbatches = config.parallel.microbatches
        self._chunks = [Chunk(model, microbatches)]
        self._variables = self._chunks[0].variables
        decayed = {path: variable_rule(path).decayed for path in self._variables}
        self._optimizer = Optimizer(config.optimizer, self._variables, decayed, training)
        rows = config.run.global_batch // self.data_size // microbatches
        shape = (rows, config.data.sequence_length, config.model.embed_dim)
        dtype = tf.as_dtype(config.parallel.precision)
        self._links = {place: Link(group, shape, dtype) for place, group in self._pairs.items()}
        orders = [
            compute_order(config.parallel.pipeline, degree, place, microbatches)
            for place in range(degree)
        ]
        self._program = plan_programs(orders)[self._place]
        self._update = tf.function(self._update_graph, autograph=False)
        self._reduce = tf.function(self._reduce_gradients, autograph=False)

    def _run_program(self, batch: Batch, step: tf.Tensor) -> list[BatchSums]:
        ready: dict[Message, tf.Tensor] = {}
        made: dict[Message, tf.Tensor] = {}
        sums: list[BatchSums] = []
        program = self._program
        last = program.num_ranks * program.num_chunks - 1
        self._intervals = []
        for action in program.actions:
            if isinstance(action, Exchange):
                send = made.pop(action.send) if action.send else None
                received, intervals = self._links[action.peer].exchange(
                    send, action.receive is not None
                )
                self._intervals.append(intervals)
                if action.receive:
                    ready[action.receive] = received
                continue
            stage = action.chunk * program.num_ranks + program.rank
            value = ready.pop(Message(action.kind, stage, action.microbatch), None)
            chunk = self._chunks[action.chunk]
            if action.kind == "forward":
                result = chunk.forward(value, batch, action.microbatch, step, True)
                if stage == last:
                    sums.append(result)
                else:
                    made[Message("forward", stage + 1, action.microbatch)] = result
            else:
                result = chunk.backward(action.microbatch, value)
                if stage:
                    made[Message("backward", stage - 1, action.microbatch)] = result
        return sums

    def _reduce_gradients(self, gradients, clock: Clock | None = None):
        reduced = {path: tf.identity(value) for path, value in gradients.items()}
        if self.config.model.tied_head and TOKEN_TABLE in reduced:
            reduced[TOKEN_TABLE] = self._groups["tied"].all_reduce(
                reduced[TOKEN_TABLE], "gradient", clock=clock
            )
        return {
            path: self._groups["data"].all_reduce(value, f"gradient/{path}", clock=clock)
            for path, value in reduced.items()
        }

    def _counted(self, path: str) -> bool:
        return not (path == TOKEN_TABLE and self._place > 0)

    def train_step(
        self, batch: Batch, step: int, learning_rate: float, max_loss: float, signal: int
    ) -> StepResult:
        sums = self._run_program(batch, tf.constant(step, tf.int64))
        result, intervals = self._update(
            {path: total for chunk in self._chunks for path, total in chunk.take_totals().items()},
            dict(batch),
            [tuple(part) for part in sums],
            tf.constant(learning_rate, tf.float32),
            tf.constant(max_loss, tf.float32),
            tf.constant(signal, tf.int32),
        )
        self._intervals.append(intervals)
        return result

    def _update_graph(self, totals, batch, sums, learning_rate, max_loss, signal):
        clock = Clock()
        gradients = self._reduce_gradients(totals, clock)
        own = {path: g for path, g in gradients.items() if self._counted(path)}
        norm = tf.cast(squared_norm(own), tf.float64) * float(self.data_rank == 0)
        count = self._num_sources
        if sums:
            row_loss = tf.cast(tf.concat([s[1] for s in sums], 0), tf.float64)
            row_tokens = tf.cast(tf.concat([s[2] for s in sums], 0), tf.float64)
        else:
            row_loss = row_tokens = tf.zeros([batch["tokens"].shape[0]], tf.float64)
        segment = batch["source_index"]
        vector = tf.concat(
            [
                [norm, tf.reduce_sum(row_loss), tf.reduce_sum(row_tokens)],
                tf.math.unsorted_segment_sum(row_loss, segment, count),
                tf.math.unsorted_segment_sum(row_tokens, segment, count),
                tf.one_hot(signal, NUM_SIGNALS, dtype=tf.float64),
            ],
            0,
        )
        vector = self._engine.world.all_reduce(vector, "sums", clock=clock)
        parts = tf.split(vector, [1, 1, 1, count, count, NUM_SIGNALS])
        decision = decide(
            self.config.optimizer,
            tf.cast(parts[0][0], tf.float32),
            parts[1][0],
            parts[2][0],
            max_loss,
        )
        self._optimizer.apply(gradients, learning_rate, decision)
        seen = tf.range(NUM_SIGNALS) * tf.cast(parts[5] > 0, tf.int32)
        result = StepResult(
            parts[1][0],
            parts[2][0],
            parts[3],
            parts[4],
            decision.grad_norm,
            decision.applied,
            tf.constant(1.0),
            tf.reduce_max(seen),
        )
        return result, clock.intervals()

    def gradient_slices(self, batch: Batch, step: int) -> list[Slice]:
        self._run_program(batch, tf.constant(step, tf.int64))
        totals = {p: t for chunk in self._chunks for p, t in chunk.take_totals().items()}
        gradients = self._reduce(totals)
        return [self._slice(path, value) for path, value in gradients.items()]

    def _slice(self, path: str, value: tf.Tensor) -> Slice:
        writer = self.data_rank == 0 and (self._counted(path) if "/" in path else True)
        array = LazyArray(value.shape, value.dtype.as_numpy_dtype, value.numpy)
        return Slice(path, tuple(value.shape), (0,) * value.shape.rank, array, writer)

    def evaluate_step(
        self, batch: Batch, weights: str = "model"
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        raise NotImplementedError

    def state_slices(self) -> Iterator[Slice]:
        for path, variable in self._variables.items():
            yield self._slice(path, variable)

    def load_state(self, reader: StateReader, weights_only: bool = False) -> list[str]:
        raise NotImplementedError

    def new_cache(self, num_rows: int, max_length: int) -> Any:
        raise NotImplementedError

    def decode_step(self, tokens, num_valid, source_row, reset, cache) -> tuple[np.ndarray, Any]:
        raise NotImplementedError

    def timings(self) -> Callable[[], dict[str, float]]:
        recorded = self._intervals

        def seconds() -> dict[str, float]:
            by_axis: dict[str, list[np.ndarray]] = {}
            for intervals in recorded:
                for axis, pairs in intervals.items():
                    by_axis.setdefault(axis, []).append(pairs.numpy())
            return {axis: seconds_in_flight(np.concatenate(x)) for axis, x in by_axis.items()}

        return seconds
