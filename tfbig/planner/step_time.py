"""The time of one optimizer step, by part. TensorFlow-free."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tfbig.config import Config
from tfbig.planner.cluster import Cluster
from tfbig.planner.kernels import Cost, Kernels
from tfbig.planner.memory import MemoryOptions
from tfbig.planner.network import ends_of_pipelines, line_of, neighbours
from tfbig.planner.offload import Offload
from tfbig.planner.software import Software
from tfbig.planner.timeline import StageTimes, Timeline, run_schedule
from trainers.activations import COMPUTE_BYTES, group_size
from trainers.mesh import Mesh, placement_order
from trainers.partition import Partition, counts_of
from trainers.validate import num_chunks

_INPUT_BYTES_PER_TOKEN = 9  # tokens and mask, twice over: from disk, and to the device


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on one pipeline rank, the busiest or another, which add up to `total`.

    Args:
      compute: forward and backward passes.
      recompute: what the backward pass makes again.
      tensor: collectives of the tensor axis.
      pipeline: hidden states on their way, while nothing else is done.
      bubble: waiting for other pipeline ranks.
      data_exposed: collectives of the data axis that nothing hides.
      transfers: between device and host memory, of what is offloaded, that nothing hides.
      optimizer: norm, clipping and update.
      input: waiting for batches.
      data_hidden: collectives of the data axis during passes; not part of the total.
      hardware_flops: of one device, recomputation included.
      bubble_share: of the pipeline's time, on the busiest rank.
    """

    compute: float
    recompute: float
    tensor: float
    pipeline: float
    bubble: float
    data_exposed: float
    transfers: float
    optimizer: float
    input: float
    data_hidden: float
    hardware_flops: float
    bubble_share: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Returns the parts that add up to the total."""
        values = dataclasses.asdict(self)
        return {
            name: value
            for name, value in values.items()
            if name not in ("data_hidden", "hardware_flops", "bubble_share")
        }


class StageSeconds(NamedTuple):
    """Seconds of a microbatch, by stage.

    Args:
      forward: of the forward pass.
      backward: of the backward pass.
      again: of what the backward pass makes again.
      tensor: of the tensor axis' collectives in both.
      waiting: for offloaded activations in both.
    """

    forward: list[float]
    backward: list[float]
    again: list[float]
    tensor: list[float]
    waiting: list[float]


def mesh_of(config: Config, num_devices: int, software: Software) -> Mesh:
    """Returns where the ranks stand; ours as --placement_strategy says, others as they do."""
    parallel = config.parallel
    model_ranks = parallel.pipeline_parallel_degree * parallel.tensor_parallel_degree
    sizes = {
        "data": num_devices // model_ranks,
        "pipeline": parallel.pipeline_parallel_degree,
        "tensor": parallel.tensor_parallel_degree,
    }
    own = software.name == "tfbig"
    return Mesh(sizes, placement_order(parallel.placement_strategy) if own else software.axes)


class StepModel:
    """The times of one layout's parts.

    Args:
      config: of the run.
      cluster: that runs it.
      options: of memory, which cost time.
      software: that runs it.
      partition: of the model.
    """

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        options: MemoryOptions,
        software: Software,
        partition: Partition,
    ) -> None:
        self._config, self._cluster, self._options = config, cluster, options
        self._software, self._partition = software, partition
        self.mesh = mesh_of(config, cluster.num_devices, software)
        self._data = self.mesh.sizes["data"]
        self._ranks, self._chunks = self.mesh.sizes["pipeline"], num_chunks(config)
        self._microbatches = config.parallel.microbatches
        self._rows = max(1, config.run.global_batch // (self._data * self._microbatches))
        self._element = COMPUTE_BYTES[config.parallel.precision]
        self._state = options.state or software.state(config, options.sharding_level)
        recompute = options.activation_checkpointing
        kernels = Kernels(config, self._rows, cluster.device, software, recompute)
        self._block, self._head, self._embedding = (
            kernels.block(),
            kernels.head(),
            kernels.embedding(),
        )
        self._tensor_forward, self._tensor_backward = self._tensor_seconds()
        self._line = line_of(cluster, self.mesh, "data")
        if software.one_card:
            card = cluster.network_bandwidth / cluster.devices_per_node * software.one_card
            self._line = dataclasses.replace(self._line, bandwidth=card)
        self._counts = [counts_of(config, partition, rank) for rank in range(self._ranks)]
        self._offload = Offload(config, cluster, options, self._state, self._rows, self._data)
        self._gathers = self._gather_seconds()

    def predict(self, place: int | None = None) -> StepTime:
        """Returns the step's time; the schedule's own operations set the pipeline's.

        Args:
          place: of the pipeline rank whose parts are asked for; None means the busiest.
        """
        forward, backward, again, tensor, waiting = self.stage_seconds()
        transfer = self.transfer_seconds()
        times = StageTimes(forward, backward)
        timeline = self._timeline(times, transfer)
        if place is None:
            place = max(range(self._ranks), key=lambda rank: timeline.busy[rank])
        held = [g for g in range(len(forward)) if g % self._ranks == place]
        recompute = self._microbatches * sum(again[g] for g in held)
        tensor_time = self._microbatches * sum(tensor[g] for g in held)
        pipeline = timeline.transfers[place]
        busy = timeline.busy[place]
        last_backward = sum(backward[g] for g in held)
        exposed, hidden, in_passes = self._data_seconds(place, last_backward)
        waits = self._microbatches * sum(waiting[g] for g in held)
        return StepTime(
            compute=busy - recompute - tensor_time - in_passes - waits,
            recompute=recompute,
            tensor=tensor_time,
            pipeline=pipeline,
            bubble=max(0.0, timeline.seconds - busy - pipeline),
            data_exposed=exposed + in_passes,
            transfers=waits + self._offload.of_state(self._counts[place].trained),
            optimizer=self._optimizer_seconds(place),
            input=self._input_seconds(timeline.seconds),
            data_hidden=hidden,
            hardware_flops=self._flops(),
            bubble_share=timeline.bubble,
        )

    def _timeline(self, times: StageTimes, transfer: float) -> Timeline:
        parallel = self._config.parallel
        return run_schedule(
            parallel.pipeline if self._ranks > 1 else "1f1b",
            self._ranks,
            self._microbatches,
            times,
            self._chunks,
            transfer,
            self._software.overlaps_pipeline,
            parallel.active_microbatches,
        )

    def stage_seconds(self) -> StageSeconds:
        """Returns, by stage, the seconds of a microbatch's passes and of their parts."""
        stages = StageSeconds([], [], [], [], [])
        last = len(self._partition.stages) - 1
        repeats = bool(group_size(self._options.activation_checkpointing))
        for index, stage in enumerate(self._partition.stages):
            blocks = stage.block_range[1] - stage.block_range[0]
            parts: list[tuple[int, Cost]] = [(blocks, self._block)]
            parts += [(1, self._embedding)] if index == 0 else []
            parts += [(1, self._head)] if index == last else []
            ahead = sum(n * cost.forward for n, cost in parts)
            back = sum(n * cost.backward for n, cost in parts)
            repeated = sum(n * cost.again for n, cost in parts)
            # Half a block's: of what the embedding looks up, and of the head's input's gradient.
            comm_forward = (blocks + (0.5 if index == 0 else 0.0)) * self._tensor_forward
            comm_backward = (blocks + (0.5 if index == last else 0.0)) * self._tensor_backward
            comm_again = blocks * self._tensor_forward if repeats else 0.0
            gathered = [blocks * seconds for seconds in self._gathers]
            exposed = self._exposed_gathers(
                gathered, ahead + comm_forward, back + repeated + comm_backward
            )
            ahead += comm_forward + exposed[0]
            back += repeated + comm_backward + comm_again + exposed[1]
            waits = self._offload.waiting(blocks, ahead, back)
            stages.forward.append(ahead + waits[0])
            stages.backward.append(back + waits[1])
            stages.again.append(repeated)
            stages.tensor.append(comm_forward + comm_backward + comm_again)
            stages.waiting.append(sum(waits))
        return stages

    def _exposed_gathers(
        self, gathered: Sequence[float], ahead: float, back: float
    ) -> tuple[float, float]:
        """Returns what of sharded weights' collectives the passes do not hide."""
        if not any(gathered):
            return 0.0, 0.0
        into, out = gathered
        if not self._software.overlaps_data:
            return into, out
        hides = self._software.hides
        return (
            max(into - ahead, (1 - hides) * into, 0.0),
            max(out - back, (1 - hides) * out, 0.0),
        )

    def _gather_seconds(self) -> tuple[float, float]:
        """Returns seconds a block of gathering sharded weights and scattering gradients.

        Of the forward and of the backward pass; level 3 only.
        """
        if self._options.sharding_level < 3 or self._data == 1:
            return 0.0, 0.0
        parameters = self._block_parameters()
        gather = self._line.all_gather(parameters * self._state.gathered)
        scatter = self._line.all_gather(parameters * self._state.summed)
        return gather, (gather if self._software.regathers else 0.0) + scatter

    def _block_parameters(self) -> float:
        """Returns the weights of a block's products on one rank."""
        model = self._config.model
        attention = model.num_heads * model.attention_head_dim
        weights = 4 * model.embed_dim * attention + 2 * model.embed_dim * model.hidden_dim
        return weights / self.mesh.sizes["tensor"]

    def _tensor_seconds(self) -> tuple[float, float]:
        """Returns seconds of a block's collectives, of the forward and of the backward pass.

        A sublayer's sum forward and its gradient's backward (arXiv 1909.08053, section 3); shared
        positions replace each all-reduce by a gather and a scatter (arXiv 2205.05198, 4.2.2).
        """
        line = line_of(self._cluster, self.mesh, "tensor")
        width = self._config.model.embed_dim
        elements = self._rows * self._config.data.sequence_length * width
        # Our sums of 16-bit numbers travel in 32 (trainers/collectives.py).
        summed = 4 if self._software.name == "tfbig" else self._element
        if self._config.parallel.sequence_parallel:
            one = line.all_gather(elements * self._element) + line.all_gather(elements * summed)
        else:
            one = line.all_reduce(elements * summed)
        return 2 * one, 2 * one

    def transfer_seconds(self) -> float:
        """Returns the seconds of a hidden state's way to the next pipeline rank."""
        if self._ranks == 1:
            return 0.0
        pair = neighbours(self._cluster, self.mesh)
        tensor = self.mesh.sizes["tensor"]
        width = self._config.model.embed_dim
        tokens = self._rows * self._config.data.sequence_length
        num_bytes = tokens * width * self._element
        if self._config.parallel.sequence_parallel:
            return pair.latency + num_bytes / tensor / pair.bandwidth
        if self._software.scatters_hidden and tensor > 1:
            gather = line_of(self._cluster, self.mesh, "tensor").all_gather(num_bytes)
            return pair.latency + num_bytes / tensor / pair.bandwidth + gather
        return pair.latency + num_bytes / pair.bandwidth

    def _data_seconds(self, rank: int, backward: float) -> tuple[float, float, float]:
        """Returns (exposed after the passes, hidden, exposed within the passes).

        Args:
          rank: pipeline rank.
          backward: seconds of its last microbatch's backward pass.
        """
        parameters, software = self._counts[rank].trained, self._software
        tied = self._tied_seconds()
        level = self._options.sharding_level
        if self._data == 1:
            return tied, 0.0, 0.0
        if level == 3:
            blocks = sum(
                s.block_range[1] - s.block_range[0]
                for s in self._partition.stages
                if s.rank == rank
            )
            total = self._microbatches * blocks * sum(self._gathers)
            forward, back, *_ = self._plain_seconds(rank)
            exposed = self._exposed_gathers([blocks * s for s in self._gathers], forward, back)
            inside = self._microbatches * sum(exposed)
            ends = self._line.all_gather(self._block_parameters() * self._state.gathered)
            return tied + ends, total - inside, inside
        if level == 0:
            comm, after = self._line.all_reduce(parameters * self._state.summed), 0.0
        else:
            # At level 2 each microbatch's gradients are summed anew (trainers/sharded_step.py).
            times = self._microbatches if level == 2 else 1
            comm = times * self._line.all_gather(parameters * self._state.summed)
            after = self._line.all_gather(parameters * self._state.gathered)
            backward *= times
        hidden = min(comm, 0.9 * backward) if software.overlaps_data else 0.0
        return comm - hidden + after + tied, hidden, 0.0

    def _plain_seconds(self, rank: int) -> tuple[float, float]:
        """Returns a level-3 rank's forward and backward seconds without gathers."""
        blocks = sum(
            s.block_range[1] - s.block_range[0] for s in self._partition.stages if s.rank == rank
        )
        ends = (self._embedding, self._head) if self._ranks == 1 else ()
        ahead = blocks * (self._block.forward + self._tensor_forward)
        back = blocks * (self._block.backward + self._block.again + self._tensor_backward)
        ahead += sum(cost.forward for cost in ends)
        return ahead, back + sum(cost.backward for cost in ends)

    def _tied_seconds(self) -> float:
        """Returns the seconds in which first and last stage sum a tied embedding's gradient."""
        model = self._config.model
        if self._ranks == 1 or not model.tied_head:
            return 0.0
        pair = ends_of_pipelines(self._cluster, self.mesh)
        table = model.vocab_size * model.embed_dim / self.mesh.sizes["tensor"]
        return pair.all_reduce(table * self._state.summed)

    def _optimizer_seconds(self, rank: int) -> float:
        """Returns the seconds of reading and writing all state once, and of norm and clipping."""
        state, parameters = self._state, self._counts[rank].trained
        on_host = self._offload.update(parameters)
        if on_host is not None:
            return on_host
        shard = parameters / (self._data if self._options.sharding_level else 1)
        per_shard = 2 * state.optimizer + 18.0  # norm 4, scaling 8, casts 6
        num_bytes = shard * per_shard + parameters * (state.weight + state.gradient)
        device = self._cluster.device
        return num_bytes / (device.memory_bandwidth * device.bandwidth)

    def _input_seconds(self, step: float) -> float:
        """Returns the seconds that reading a batch takes beyond the step before it."""
        per_node = self._config.run.global_batch / self._cluster.num_nodes
        num_bytes = per_node * self._config.data.sequence_length * _INPUT_BYTES_PER_TOKEN
        return max(0.0, num_bytes / self._cluster.input_bandwidth - step)

    def _flops(self) -> float:
        """Returns the FLOPs of all devices' products in a step, divided by the devices."""
        blocks = sum(s.block_range[1] - s.block_range[0] for s in self._partition.stages)
        once = blocks * self._block.flops + self._head.flops
        return self._microbatches * once / self._ranks
