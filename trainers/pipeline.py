"""Models larger than one device: any mesh of data, pipeline and tensor parallelism on Horovod."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfbig.checkpoint_format import Slice
from tfbig.config import Config
from tfbig.loss_scale import LossScale
from tfbig.model.gpt import GPT
from tfbig.model.initialization import part_value
from tfbig.step_spans import Spans
from tfbig.together import on_every_rank
from tfbig.variables import is_trained
from trainers.agreement import check_equal_ranks
from trainers.base import Batch, Layout, StateReader, StepResult, Trainer
from trainers.bucket_plan import plan_buckets
from trainers.clock import Stopwatch, joined, seconds_in_flight
from trainers.collectives import Engine, Group
from trainers.copied_optimizer import CopiedOptimizer
from trainers.devices import prepare_devices
from trainers.flat_buckets import flat_buckets
from trainers.mesh import make_mesh, mesh_groups, warn_of_slow_tensor_groups
from trainers.mesh_decoding import MeshDecoder
from trainers.partition import choose_partition
from trainers.pipeline_link import Link
from trainers.pipeline_program import idle_share, plan_programs
from trainers.pipeline_schedule import compute_order, forward_order
from trainers.pipeline_stage import Chunk
from trainers.pipeline_stepper import Stepper
from trainers.pipeline_update import MeshGroups, Update
from trainers.replica_check import mesh_check
from trainers.sharded_optimizer import ShardedOptimizer
from trainers.tensor_parallel import TensorParallel
from trainers.tensor_state import TensorState
from trainers.tensor_table import shard_table
from trainers.unallocated import stored_as_used
from trainers.validate import check_mesh_fits, check_one_device, derive_microbatch_size, num_chunks

FLOAT32_BYTES = 4


class PipelineTrainer(Trainer):
    """Trains, in each process, one tensor shard of one stage of one replica."""

    def __init__(self, config: Config) -> None:
        self.config = config
        parallel, model = config.parallel, config.model
        check_mesh_fits(config)
        check_one_device(config)
        # First a world without groups: groups that differ between ranks would hang the start.
        self._engine = Engine(deterministic=parallel.deterministic)
        try:
            self.local_rank, self.local_size = self._engine.local_rank, self._engine.local_size
            prepare_devices(parallel, self.local_rank, self.local_size)
            check_equal_ranks(self._engine.differs, config)
            with on_every_rank():
                self._choose_layout()
        finally:
            self._engine.close()
        self._num_chunks = num_chunks(config)
        groups = mesh_groups(self.mesh, self._num_chunks > 1, model.tied_head)
        timeout = config.robustness.hang_timeout
        self._engine = Engine(groups, parallel.deterministic, hang_timeout=timeout)
        self.rank, self.size = self._engine.rank, self._engine.size
        self.places = self.mesh.coordinates(self.rank)
        self.data_rank = self.places["data"]
        self.data_size = self.num_replicas = self.mesh.sizes["data"]
        self._place, self._degree = self.places["pipeline"], self.mesh.sizes["pipeline"]
        self._sort_groups()
        if self.rank == 0:
            warn_of_slow_tensor_groups(self.mesh, self.local_size)

    def _choose_layout(self) -> None:
        """Chooses the mesh, the microbatches' size and the stages: the same on every rank."""
        config, parallel = self.config, self.config.parallel
        self.mesh = make_mesh(
            self._engine.size,
            parallel.pipeline_parallel_degree,
            parallel.tensor_parallel_degree,
            parallel.placement_strategy,
        )
        num_replicas = self.mesh.sizes["data"]
        self._microbatch_size = derive_microbatch_size(
            config.run.global_batch, num_replicas, parallel.microbatches
        )
        self.partition = choose_partition(
            config, self._microbatch_size, parallel.activation_checkpointing, num_replicas
        )

    def set_attention(self, form: str) -> None:
        super().set_attention(form)
        self._choose_layout()  # stages are balanced by what their blocks keep

    def _sort_groups(self) -> None:
        alone = Group("", [self.rank], None, self.rank)
        own: dict[str, Group] = {"data": alone, "tensor": alone}
        self._pairs: dict[int, Group] = {}
        for group in self._engine.groups:
            if group.rank < 0:
                continue
            if group.axis == "pipeline":
                peer = group.ranks[1 - group.rank]
                self._pairs[self.mesh.coordinates(peer)["pipeline"]] = group
            else:
                own[group.axis] = group
        self._groups = MeshGroups(self._engine.world, own["data"], own["tensor"], own.get("tied"))

    def agree(self, value: int, op: str) -> int:
        return self._engine.agree(value, op)

    def gather(self, values: np.ndarray) -> np.ndarray:
        return self._engine.gather(values)

    def broadcast(self, array: np.ndarray) -> np.ndarray:
        return self._engine.broadcast(array)

    def barrier(self, timeout: float) -> None:
        self._engine.barrier(timeout)

    def stalled(self) -> list[str]:
        return self._engine.stalled()

    def close(self) -> None:
        self._engine.close()

    def build(self, training: bool = True, num_sources: int = 1, vocab_size: int = 0) -> None:
        config = self.config
        self._vocab_size = vocab_size or config.model.vocab_size
        self._stopwatch = Stopwatch()
        self._split = TensorParallel(
            self._groups.tensor, config.parallel.sequence_parallel, self._stopwatch
        )
        variables = self._make_parts(training)
        self._shards = shard_table(
            config.model, self._paths(variables), self.places, self.mesh.sizes
        )
        self._replica_check = mesh_check(self._engine, config.model, self.mesh, variables)
        for path, variable in variables.items():
            assert tuple(variable.shape) == self._shards[path].local_shape, path
        trained = {path: s for path, s in self._shards.items() if self._is_trained(path)}
        own = {path: variable for path, variable in variables.items() if path in trained}
        self._optimizer = self._make_optimizer(own, training)
        self._loss_scale = LossScale(config)
        state = self._optimizer.state() | self._loss_scale.state()
        self._state = TensorState(self._shards, variables, state, self.rank == 0)
        has_head = self._place == self._degree - 1
        self._update = Update(
            config,
            trained,
            self._groups,
            self._optimizer,
            self._loss_scale,
            num_sources,
            sums_here=has_head and self.places["tensor"] == 0,
        )
        self._stepper = self._make_stepper()
        self._program = self._training_program()
        self._forward_programs: dict[int, Any] = {}
        self._share = tf.function(self._share_graph, autograph=False)
        self._decoder = self._make_decoder()
        self._intervals: list[Any] = []

    def _make_model(self, block_range: tuple[int, int] | None, **options: Any) -> GPT:
        parallel = self.config.parallel
        return GPT.from_config(
            self.config.model,
            block_range,
            seed=self.config.run.seed,
            precision=parallel.precision,
            split=self._split,
            attention=parallel.attention,
            activation_checkpointing=parallel.activation_checkpointing,
            offload_horizon=parallel.offload_horizon,
            loss=self.config.loss,
            **options,
        )

    def _make_weights(self, block_range: tuple[int, int] | None, **options: Any) -> GPT:
        """Returns a model with its variables; where state is shared, what is trained as it is used.

        Exact values are then with the optimizer, a part on each data rank.
        """
        parallel = self.config.parallel
        if parallel.sharding_level == 0 or parallel.precision == "float32":
            return self._make_model(block_range, **options)
        make = functools.partial(self._make_model, block_range, initial_values=False, **options)
        return stored_as_used(make, self._initial_value, self._is_trained)

    def _is_trained(self, path: str) -> bool:
        return is_trained(path, self.config.model, self.config.optimizer.freeze)

    def _initial_value(self, path: str) -> tf.Tensor:
        """Returns what a variable of this rank starts from, float32."""
        return part_value(self.config.model, self.config.run.seed, path, self._split)

    def _make_parts(self, training: bool) -> dict[str, tf.Variable]:
        """Makes what this rank computes with and returns its variables, by path."""
        ranges = [
            self.partition.stages[chunk * self._degree + self._place].block_range
            for chunk in range(self._num_chunks)
        ]
        # Microbatches in flight would each keep a gradient of the head as large as its weight.
        models = [self._make_weights(blocks, chunked_head=False) for blocks in ranges]
        options = self.config.parallel.jit_compile, self.config.optimizer.freeze
        self._chunks = [Chunk(model, training, *options) for model in models]
        return {path: v for chunk in self._chunks for path, v in chunk.variables.items()}

    def differing_replicas(self) -> list[tuple[str, list[int]]]:
        return self._replica_check.differing()

    def _paths(self, variables: Mapping[str, tf.Variable]) -> list[str]:
        """Returns the paths of what this rank has or shares."""
        return list(variables)

    def _make_stepper(self) -> Any:
        """Returns what runs this rank's passes."""
        dtype = tf.as_dtype(self._chunks[0].model.compute_dtype)
        links = {place: Link(group, dtype) for place, group in self._pairs.items()}
        return Stepper(self._chunks, links)

    def _make_optimizer(
        self, variables: dict[str, tf.Variable], training: bool
    ) -> CopiedOptimizer | ShardedOptimizer:
        parallel = self.config.parallel
        sizes = {path: variable.shape.num_elements() for path, variable in variables.items()}
        max_elements = (parallel.bucket_megabytes << 20) // FLOAT32_BYTES
        arguments = self.config, variables, self._shards
        paths = plan_buckets(sizes, max_elements)
        if parallel.sharding_level == 0:
            return CopiedOptimizer(*arguments, paths, self._groups.data, training)
        buckets = flat_buckets(sizes, paths, self._groups.data.size)
        sharded = ShardedOptimizer(*arguments, buckets, self._groups.data, training)
        sharded.begin(self._initial_value)
        return sharded

    def _training_program(self):
        parallel = self.config.parallel
        orders = [
            compute_order(
                parallel.pipeline if self._degree > 1 else "1f1b",
                self._degree,
                place,
                parallel.microbatches,
                self._num_chunks,
                parallel.active_microbatches,
            )
            for place in range(self._degree)
        ]
        programs = plan_programs(orders, self._num_chunks)
        self._bubble = idle_share(programs, parallel.microbatches * self._num_chunks)
        return programs[self._place]

    def _forward_program(self, num_pieces: int):
        if num_pieces not in self._forward_programs:
            order = forward_order(self._degree, num_pieces, self._num_chunks)
            programs = plan_programs([order] * self._degree, self._num_chunks)
            self._forward_programs[num_pieces] = programs[self._place]
        return self._forward_programs[num_pieces]

    def _message_shape(self, rows: int, length: int) -> tuple[int, int, int]:
        return rows, self._split.own_length(length), self.config.model.embed_dim

    def train_step(
        self, batch: Batch, step: int, learning_rate: float, max_loss: float, signal: int
    ) -> StepResult:
        sums = self._run_passes(batch, step)
        result, intervals = self._update.run(
            self._take_totals(),
            {"source_index": batch["source_index"]},
            [(part.row_loss_sum, part.row_num_tokens) for part in sums],
            tf.constant(learning_rate, tf.float32),
            tf.constant(max_loss, tf.float32),
            tf.constant(signal, tf.int32),
        )
        self._intervals = [*self._stepper.intervals, intervals]
        return result

    def gradient_slices(self, batch: Batch, step: int) -> list[Slice]:
        self._run_passes(batch, step)
        return list(self._optimizer.slices_of(self._update.reduce(self._take_totals())))

    def _run_passes(self, batch: Batch, step: int):
        rows, length = batch["tokens"].shape
        shape = self._message_shape(rows // self.config.parallel.microbatches, length - 1)
        step_tensor = tf.constant(step, tf.int64)
        return self._stepper.run(
            self._program,
            batch,
            step_tensor,
            shape,
            training=True,
            loss_scale=self._loss_scale.of_the_sum(),
        )

    def _take_totals(self) -> Any:
        return {path: x for chunk in self._chunks for path, x in chunk.take_totals().items()}

    def evaluate_step(
        self, batch: Batch, weights: str = "model"
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        averages = self._averages() if weights == "ema" else None
        rows, length = batch["tokens"].shape
        pieces = max(n for n in range(1, self._degree + 1) if rows % n == 0)
        sums = self._stepper.run(
            self._forward_program(pieces),
            batch,
            tf.constant(0, tf.int64),
            self._message_shape(rows // pieces, length - 1),
            training=False,
            weights=averages,
        )
        own = np.zeros([self.data_size, rows, 3], np.float32)
        if sums and self.places["tensor"] == 0:
            parts = [tf.stack(part[1:], axis=1) for part in sums]  # (rows of a piece, 3)
            own[self.data_rank] = tf.concat(parts, 0)
        everyone = self._share(tf.constant(own)).numpy().reshape([-1, 3])  # (global batch, 3)
        return everyone[:, 0], everyone[:, 1], everyone[:, 2]

    def _averages(self) -> Any:
        """Returns what the stepper takes in place of the weights."""
        assert self.config.optimizer.ema_decay > 0, "this run keeps no moving average"
        return self._optimizer.averages()

    def _share_graph(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the sum over all ranks, all but one of which pass zeros at any element."""
        name = "shared_" + "x".join(map(str, tensor.shape))
        return self._engine.world.all_reduce(tensor, name)

    def state_slices(self) -> Iterator[Slice]:
        exact = self._optimizer.holds_weights
        for part in self._state.slices():
            is_weight = part.path in self._shards
            if not (exact and is_weight and self._is_trained(part.path)):  # else the optimizer's
                yield part
        yield from self._optimizer.slices()

    def load_state(self, reader: StateReader, weights_only: bool = False) -> list[str]:
        missing = self._state.load(reader, weights_only)
        missing += self._optimizer.load(reader, weights_only)
        if weights_only:
            self._optimizer.restart_averages()
        return missing

    def _make_decoder(self) -> Any:
        """Returns what keeps this rank's part of a decode cache and computes with it."""
        models = [chunk.model for chunk in self._chunks]
        return MeshDecoder(models, self._stepper, self._forward_program(1))

    def new_cache(self, num_rows: int, max_length: int) -> Any:
        return self._decoder.new_cache(num_rows, max_length)

    def decode_step(
        self,
        tokens: np.ndarray,
        num_valid: np.ndarray,
        source_row: np.ndarray,
        reset: np.ndarray,
        cache: Any,
    ) -> tuple[np.ndarray, Any]:
        own, cache = self._decoder.step(tokens, num_valid, source_row, reset, cache)
        start, width = self._split.part(self.config.model.vocab_size)
        everyone = np.zeros([len(tokens), width * self._split.size], np.float32)
        if own is not None and self.data_rank == 0:
            everyone[:, start : start + width] = own
        logits = self._share(tf.constant(everyone)).numpy()[:, : self.config.model.vocab_size]
        logits[:, self._vocab_size :] = -np.inf
        return logits, cache

    def layout(self) -> Layout:
        sizes = ", ".join(f"{axis} {size}" for axis, size in self.mesh.sizes.items())
        parallel, bubble = self.config.parallel, self._bubble
        text = f"mesh {sizes}; placement {parallel.placement_strategy}"
        if self._degree > 1:
            text += f"; bubble {bubble:.1%} of a step if all passes are equal ({parallel.pipeline})"
        record = {"mesh": dict(self.mesh.sizes), "stages": self.partition.to_dict()}
        return Layout(f"{text}\n{self.partition.table()}", record | {"bubble": round(bubble, 4)})

    def pass_seconds(self) -> dict[str, float]:
        """Returns the seconds of the last step's "forward" and "backward" passes on this rank."""
        return dict(self._stepper.seconds)

    def timings(self) -> Callable[[], dict[str, float]]:
        recorded, tensor_seconds = self._intervals, self._stopwatch.take()

        def seconds() -> dict[str, float]:
            total = {axis: seconds_in_flight(x) for axis, x in joined(recorded).items()}
            if self.mesh.sizes["tensor"] > 1:
                total["tensor"] = total.get("tensor", 0.0) + tensor_seconds
            return total

        return seconds

    def spans(self) -> Callable[[], Spans]:
        recorded, passes = self._intervals, self._stepper.passes
        ran = {kind: np.array(pairs) for kind, pairs in passes.items() if pairs}
        return lambda: joined(recorded) | ran
