"""The peak memory of each pipeline rank, by part, before anything runs. TensorFlow-free.

`predict_memory` asks the code that trains for partition, parameters and microbatches in flight.
Sharded state follows ZeRO (arXiv 1910.02054): optimizer state over the data axis from level 1 on,
gradients from 2, weights from 3.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tfbig.config import Config
from tfbig.planner.fused_activations import (
    fused_block_bytes,
    fused_embedding_bytes,
    fused_head_bytes,
)
from tfbig.token_chunks import chunk_tokens
from trainers.activations import (
    COMPUTE_BYTES,
    block_bytes,
    group_size,
    input_bytes,
    is_blockwise,
    own_vocabulary,
)
from trainers.partition import Partition, Stage, choose_partition, counts_of
from trainers.pipeline_schedule import all_orders, enough
from trainers.state_bytes import HAVE_TOTALS, NOTHING, Counts, StateBytes, own_state, rank_counts
from trainers.validate import gradient_reduction, num_chunks

FUSION_BYTES = 128 << 20  # as trainers/collectives.py sets HOROVOD_FUSION_THRESHOLD
Stages = Sequence[tuple[int, Stage]]  # of a pipeline rank, with their numbers


@dataclass(frozen=True)
class Overhead:
    """What a process takes beside tensors that this module can count.

    Args:
      context: bytes of the process before it builds a model.
      communicator: bytes of one group of ranks, its buffers.
      allocator: share of all tensors that the allocator holds beyond them.
      buffers: bytes of buckets that are allocated whatever the model.
      copies: that Horovod and its transport make of a bucket on its way: HOST_COPIES between hosts'
        memories, none between GPUs, whose NCCL has buffers of its own.
      passes: more bytes of a process whose passes are functions of their own (HAVE_TOTALS).
    """

    context: float = 0.0
    communicator: float = 0.0
    allocator: float = 0.0
    buffers: float = 0.0
    copies: float = 0.0
    passes: float = 0.0


# Of Horovod's fusion buffer and Gloo's (docs/memory.md measured them).
HOST_COPIES = 3.0


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """What a run does to need less, and with which kernels.

    Args:
      sharding_level: ZeRO's: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too.
      activation_checkpointing: none, attention, block or group_N.
      offload_activations: recomputation's inputs wait in host memory.
      offload_optimizer_state: slots and master copy live in host memory.
      kernels: "tensorflow" counts what our graphs keep, "fused" what Megatron-LM's kernels keep.
      state: bytes a parameter; None means ours, by precision and optimizer.
      layers_loaded: inputs that offloading has on the device at a time.
    """

    sharding_level: Literal[0, 1, 2, 3] = 0
    activation_checkpointing: str = "none"
    offload_activations: bool = False
    offload_optimizer_state: bool = False
    kernels: Literal["tensorflow", "fused"] = "tensorflow"
    state: StateBytes | None = None
    layers_loaded: int = 4

    @classmethod
    def of(cls, config: Config) -> "MemoryOptions":
        """Returns the options of a run of our own program."""
        parallel = config.parallel
        return cls(
            sharding_level=parallel.sharding_level,  # type: ignore[arg-type]
            activation_checkpointing=parallel.activation_checkpointing,
            offload_activations=parallel.offload_activations,
            offload_optimizer_state=parallel.offload_optimizer_state,
            layers_loaded=max(1, parallel.activation_loading_horizon),
        )

    def on_host(self) -> "MemoryOptions":
        """Returns the options where tensors lie in host memory: what is offloaded stays in it."""
        return dataclasses.replace(self, offload_activations=False, offload_optimizer_state=False)


@dataclass(frozen=True)
class RankMemory:
    """Peak bytes of one pipeline rank, by part.

    Args:
      weights: what passes read, gathered blocks of sharded weights not included.
      gradients: summed and passing ones.
      optimizer: slots, averages, master copy.
      activations: of all microbatches in flight.
      logits: what the last stage's head and loss hold.
      buffers: of collectives, of gathered and of flattened tensors.
      workspace: temporaries of a pass, a recomputed block's among them.
      context: the process itself.
      host: bytes in host memory instead, by offloading; not part of the total.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    workspace: float
    context: float
    host: float = 0.0

    @property
    def total(self) -> float:
        """Bytes on the device."""
        tensors = self.weights + self.gradients + self.optimizer + self.activations
        return tensors + self.logits + self.buffers + self.workspace + self.context


def predict_memory(
    config: Config,
    data_size: int,
    options: MemoryOptions | None = None,
    overhead: Overhead | None = None,
    partition: Partition | None = None,
) -> list[RankMemory]:
    """Returns the peak memory of each pipeline rank, by part; of a whole model for p = 1.

    Args:
      config: of the run; microbatches and degrees are taken from it.
      data_size: ranks of the data axis.
      options: None means what `config` says.
      overhead: of a process; None counts tensors only.
      partition: None means the one that training would choose.

    >>> config = Config()
    >>> [rank] = predict_memory(config, data_size=1)
    >>> rank.weights == 4 * 1_315_584
    True
    """
    options = options or MemoryOptions.of(config)
    parallel = config.parallel
    rows = max(1, config.run.global_batch // (data_size * parallel.microbatches))
    recompute = options.activation_checkpointing
    partition = partition or choose_partition(config, rows, recompute, data_size)
    model = Accounting(config, data_size, rows, options, overhead or Overhead())
    return [model.rank(place, partition) for place in range(parallel.pipeline_parallel_degree)]


class Accounting:
    """Counts a rank's parts; one instance a layout."""

    def __init__(
        self, config: Config, data_size: int, rows: int, options: MemoryOptions, overhead: Overhead
    ) -> None:
        self.config, self.data, self.rows = config, data_size, rows
        self.options, self.overhead = options, overhead
        self.state = options.state or own_state(config, options.sharding_level)
        self.element = COMPUTE_BYTES[config.parallel.precision]
        self.tensor = config.parallel.tensor_parallel_degree
        self.num_ranks = config.parallel.pipeline_parallel_degree
        self.num_stages = self.num_ranks * num_chunks(config)
        fused = options.kernels == "fused"
        self.block = fused_block_bytes if fused else block_bytes

    def rank(self, place: int, partition: Partition) -> RankMemory:
        """Returns the parts of pipeline rank number `place`."""
        stages = [
            (index, stage) for index, stage in enumerate(partition.stages) if stage.rank == place
        ]
        assert stages, f"no stage on rank {place}"
        return self.parts(counts_of(self.config, partition, place), stages)

    def parts(self, counts: Counts, stages: Stages) -> RankMemory:
        """Returns the parts of a rank with such parameters and stages."""
        last = self.num_stages - 1
        is_last = any(index == last for index, _ in stages)
        is_end = is_last or any(index == 0 for index, _ in stages)
        entered = sum(stage.in_flight for index, stage in stages if index == 0)
        state, kept = self.state_parts(counts, is_end)
        held = blocks_in_flight(self.config, stages)
        passes, waiting = self.pass_parts(held, entered, is_last)
        tensors = state | passes
        tensors["workspace"] += self.overhead.allocator * sum(tensors.values())
        return RankMemory(context=self.context, host=kept + waiting, **tensors)

    @property
    def context(self) -> float:
        """Bytes of the process itself."""
        has_passes = self.config.parallel.strategy in HAVE_TOTALS
        return self.overhead.context + (self.overhead.passes if has_passes else 0.0)

    def state_parts(self, counts: Counts, is_end: bool) -> tuple[dict[str, float], float]:
        """Returns what does not depend on the microbatches in flight, and the host's bytes.

        Args:
          counts: parameters of the rank.
          is_end: whether it holds the first or the last stage.
        """
        options, state, level = self.options, self.state, self.options.sharding_level
        shares = [self.data if level >= stage else 1 for stage in (1, 2, 3)]
        weights = state.weights(counts) / shares[2]
        optimizer = state.optimizer * counts.trained / shares[0]
        unit = self._unit(is_end, counts) if level >= 2 else counts
        gradients = state.gradients(counts, self.data) / shares[1]
        gradients += state.passing * unit.trained
        host = 0.0
        if options.offload_optimizer_state:
            host, optimizer = optimizer, 0.0
            if level == 3:  # the exact weights lie with the slots
                host, weights = host + weights, 0.0
        buffers = self._buffers(counts, unit) + self.overhead.buffers
        buffers += self.overhead.communicator * self._num_communicators()
        tensors = {
            "weights": weights,
            "gradients": gradients,
            "optimizer": optimizer,
            "buffers": buffers,
        }
        return tensors, host

    def pass_parts(
        self, held: float, entered: float, is_last: bool
    ) -> tuple[dict[str, float], float]:
        """Returns what passes hold, and their bytes on the host.

        Args:
          held: pairs of a block and a microbatch in flight.
          entered: microbatches in flight of the first stage; 0 on other ranks.
          is_last: whether the rank has the head.
        """
        device, host = self._activations(held, entered)
        tensors = {
            "activations": device,
            "logits": self._logits() if is_last else 0.0,
            "workspace": self._workspace(),
        }
        return tensors, host

    def _activations(self, held: float, entered: float) -> tuple[float, float]:
        """Returns (bytes on the device, bytes on the host) of all microbatches in flight."""
        recompute = self.options.activation_checkpointing
        per_block = self.block(self.config, self.rows, recompute)
        device, host = held * per_block, 0.0
        if self.options.offload_activations and group_size(recompute):
            loaded = min(device, per_block * self.options.layers_loaded)
            device, host = loaded, device - loaded
        if self.options.kernels == "fused":
            device += fused_embedding_bytes(self.config, self.rows) * entered
        # A stage's own inputs and outputs on their way between ranks.
        if self.num_stages > 1:
            device += 2 * input_bytes(self.config, self.rows)
        return device, host

    def _logits(self) -> float:
        """Returns what head and loss hold at their peak: logits, and their gradient."""
        tokens, own = self.rows * self.config.data.sequence_length, own_vocabulary(self.config)
        if self.options.kernels == "fused":
            # Narrow logits, a float32 softmax in their place, and its gradient, narrow again.
            kept = fused_head_bytes(self.config, self.rows)
            return kept + (float(self.element * tokens * own) if self.element < 4 else 0.0)
        chunk = float(min(tokens, chunk_tokens(own)) * own)
        if self.chunked_head:
            return 2 * 4.0 * chunk + input_bytes(self.config, self.rows)
        return 2 * 4.0 * chunk + (self.element * chunk if self.element < 4 else 0.0)

    @property
    def chunked_head(self) -> bool:
        """Whether gradients are made with the loss (tfbig/model/chunked_loss.py)."""
        parallel = self.config.parallel
        return parallel.strategy != "pipeline" and parallel.precision != "float16"

    def _unit(self, is_end: bool, counts: Counts) -> Counts:
        """Returns the parameters of the largest of the units that are gathered one by one."""
        config = self.config
        count = functools.partial(rank_counts, config.model, (), self.tensor)
        unit = max(1, group_size(self.options.activation_checkpointing))
        largest = NOTHING.plus(count((0, 1), False, False), min(unit, config.model.num_layers))
        if is_end:
            largest = max(largest, count((0, 0), True, False))
        return largest._replace(trained=min(largest.trained, counts.trained))

    def _buffers(self, counts: Counts, unit: Counts) -> float:
        """Returns flat gradient buckets, and gathered weights where these are sharded."""
        if self.data == 1:
            return 0.0
        state, level = self.state, self.options.sharding_level
        bucket = float(self.config.parallel.bucket_megabytes * 2**20)
        if self.options.kernels == "fused" and level < 2:
            return 2 * min(bucket, state.gradient * counts.total)
        if level == 0:
            return self._all_reduced(counts)
        if level == 1:
            # Two buckets are under way; a large table has one of its own.
            whole = state.summed * counts.trained
            bucket = min(max(bucket, state.summed * counts.largest), whole)
            return (2 + self.overhead.copies) * bucket
        # A unit's flat gradients and those of the one before; of weights, what is in use, and what
        # arrives in one piece and is then cut.
        times = 2 + self.overhead.copies
        gathered = (state.gathered * times + self.element) * unit.total
        return state.summed * times * unit.trained + (gathered if level == 3 else 0.0)

    def _all_reduced(self, counts: Counts) -> float:
        """Returns what Horovod holds while it sums all gradients, beyond a microbatch's own.

        Each result has its room as soon as Horovod is told of it. It copies what it sums at a time
        into one buffer, of its threshold; between hosts' memories all of a tape's group was copied.
        """
        parallel, whole = self.config.parallel, self.state.summed * counts.trained
        has_totals = parallel.strategy in HAVE_TOTALS
        flat = whole if has_totals else 0.0  # a copy of the totals
        tape = not has_totals and gradient_reduction(parallel) == "tape"
        fused = whole if tape and self.overhead.copies else min(whole, FUSION_BYTES)
        return max(0.0, flat + whole - self.state.passing * counts.trained) + fused

    def _workspace(self) -> float:
        """Returns the temporaries of one block's passes."""
        config, recompute = self.config, self.options.activation_checkpointing
        tokens = self.rows * config.data.sequence_length
        group = group_size(recompute)
        again = group * self.block(config, self.rows, "none") if group else 0.0
        # The gradients of the widest tensors of a block: feed-forward, and attention's weights.
        wide = 2 * config.model.hidden_dim / self.tensor + 2 * config.model.embed_dim
        passing = tokens * wide * self.element
        if not is_blockwise(config):
            scores = config.model.num_heads / self.tensor * config.data.sequence_length * tokens
            passing += scores * (4 if self.options.kernels == "tensorflow" else 2 * self.element)
            if recompute == "attention":
                again = scores * (4 + self.element)
        return again + passing

    def _num_communicators(self) -> int:
        """Returns the groups that a rank talks in, the world's among them."""
        sizes = (self.data, self.tensor)
        axes = sum(size > 1 for size in sizes)
        pairs = min(2, self.num_ranks - 1)
        return (1 + axes + pairs) if self.data * self.tensor * self.num_ranks > 1 else 0


def blocks_in_flight(config: Config, stages: Stages) -> int:
    """Returns the most (block, microbatch) pairs whose activations a pipeline rank holds at once.

    Args:
      config: of the run.
      stages: (number, stage) of those that the rank holds.
    """
    parallel = config.parallel
    blocks = [stage.block_range[1] - stage.block_range[0] for _, stage in stages]
    if len(stages) == 1:
        return blocks[0] * stages[0][1].in_flight
    ranks = parallel.pipeline_parallel_degree
    microbatches = enough(ranks, parallel.microbatches, parallel.active_microbatches)
    orders = all_orders(
        parallel.pipeline, ranks, microbatches, len(stages), parallel.active_microbatches
    )
    held = most = 0
    for work in orders[stages[0][1].rank]:
        held += blocks[work.chunk] * (1 if work.kind == "forward" else -1)
        most = max(most, held)
    return most


def peak(ranks: Sequence[RankMemory]) -> RankMemory:
    """Returns the rank that needs most."""
    return max(ranks, key=lambda rank: rank.total)


def first_middle_last(ranks: Sequence[RankMemory]) -> dict[str, RankMemory]:
    """Returns the first, a middle and the last pipeline rank, by those names."""
    return {"first": ranks[0], "middle": ranks[len(ranks) // 2], "last": ranks[-1]}
