"""How a training program spends memory and time: ours, and those of published runs.

A row describes kernels, number formats and what overlaps; none holds a measured time. TF-free.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from tfbig.config import Config
from tfbig.errors import UserError, near_matches
from tfbig.planner.cluster import Cluster
from tfbig.planner.memory import MemoryOptions, Overhead
from trainers.activations import COMPUTE_BYTES
from trainers.state_bytes import StateBytes, own_state


@dataclass(frozen=True, kw_only=True)
class Software:
    """A training program.

    Args:
      name: as --software says it.
      kernels: how elementwise operations are joined: "fused" (Megatron-LM's), "eager" (one kernel
        an operation), "compiled" (chains in one kernel), "neox" (GPT-NeoX's), "tensorflow" (ours).
      attention: "own" (--attention's plain or blockwise form), or a fused kernel: "flash" or
        "flash2".
      weight: bytes of a weight that passes read.
      gradient: bytes of a summed gradient.
      passing: bytes of a microbatch's gradient before it is added.
      optimizer: bytes of slots and master copy; None means ours by precision and optimizer.
      wire: bytes of a gradient in a collective.
      overlaps_data: whether gradients are reduced while others are computed.
      overlaps_pipeline: whether hidden states travel while others are computed.
      scatters_hidden: whether a tensor group sends each hidden state once, in parts.
      regathers: whether weights sharded over the data axis are gathered for the backward pass too.
      repeats_products: share of a block's products with weights that the backward pass makes again,
        with all elementwise operations: selective recomputation by operation.
      one_card: share of one network card's bandwidth by which rings of the data axis cross nodes; 0
        means that the ranks of a node pool their cards.
      hides: share of the data axis' collectives that passes can hide, where they overlap.
      communicators: groups a rank talks in beyond those of its axes.
      fixed_buffers: bytes of buckets that are allocated whatever the model.
      axes: mesh axes, the last one's ranks are neighbours.
    """

    name: str
    kernels: Literal["fused", "eager", "compiled", "neox", "tensorflow"]
    attention: Literal["own", "flash", "flash2"] = "own"
    weight: float = 2.0
    gradient: float = 2.0
    passing: float = 0.0
    optimizer: float | None = 12.0
    wire: float = 2.0
    overlaps_data: bool = False
    overlaps_pipeline: bool = False
    scatters_hidden: bool = False
    regathers: bool = True
    repeats_products: float = 0.0
    one_card: float = 0.0
    hides: float = 1.0
    communicators: int = 0
    fixed_buffers: float = 0.0
    axes: str = "PDT"

    def state(self, config: Config, sharding_level: int) -> StateBytes:
        """Returns the bytes a parameter takes."""
        if self.optimizer is None:
            return own_state(config, sharding_level)
        element = COMPUTE_BYTES[config.parallel.precision]
        return StateBytes(
            self.weight,
            self.gradient,
            self.optimizer,
            self.passing,
            gathered=element,
            summed=self.wire,
        )

    def memory_options(self, config: Config) -> MemoryOptions:
        """Returns what a run does to need less memory, with this program's kernels and numbers."""
        own = MemoryOptions.of(config)
        if self.optimizer is None:
            return own
        state = self.state(config, own.sharding_level)
        return dataclasses.replace(own, kernels="fused", state=state)

    def overhead(self, cluster: Cluster) -> Overhead:
        """Returns what a process takes on the cluster's devices beside tensors."""
        own = cluster.overhead
        communicator = own["communicator_bytes"]
        return Overhead(
            own["context_bytes"],
            communicator,
            own["allocator_fraction"],
            self.fixed_buffers + self.communicators * communicator,
            own.get("transport_copies", 0.0),
            own.get("passes_bytes", 0.0),
        )


SOFTWARE = {
    row.name: row
    for row in (
        Software(name="tfbig", kernels="tensorflow", optimizer=None, wire=4.0, axes="DPT"),
        # github.com/NVIDIA/Megatron-LM, dist_optimizer.md: float16 weights and gradients take 20
        # bytes a parameter (2 + 2 + 4 master + 4 master gradient + 8), bfloat16 with float32 sums
        # 18 (2 + 4 + 12).
        Software(name="megatron", kernels="fused", optimizer=16.0, scatters_hidden=True),
        Software(
            name="megatron-bf16", kernels="fused", scatters_hidden=True, gradient=4.0, wire=4.0
        ),
        # Megatron Core of 2024: FlashAttention 2, gradients and hidden states travel meanwhile.
        Software(
            name="megatron-core",
            kernels="fused",
            attention="flash2",
            scatters_hidden=True,
            overlaps_data=True,
            overlaps_pipeline=True,
            gradient=4.0,
            wire=4.0,
        ),
        # Megatron-DeepSpeed allocates reduce and gather buckets of 5e8 elements (its defaults) in
        # ZeRO; its groups are made by both programs.
        Software(
            name="megatron-deepspeed",
            kernels="fused",
            scatters_hidden=True,
            optimizer=16.0,
            communicators=8,
            fixed_buffers=2e9,
        ),
        # Its bfloat16 optimizer keeps the microbatch's gradient beside float32 sums.
        Software(
            name="megatron-deepspeed-bf16",
            kernels="fused",
            scatters_hidden=True,
            passing=2.0,
            communicators=8,
            fixed_buffers=2e9,
            gradient=4.0,
            wire=4.0,
        ),
        # PyTorch's FSDP, eager kernels and FlashAttention; gathers the next block meanwhile.
        Software(name="fsdp", kernels="eager", attention="flash", overlaps_data=True),
        Software(name="fsdp2", kernels="eager", attention="flash2", overlaps_data=True),
        # torchtitan keeps every second product, and attention's output.
        Software(
            name="fsdp2-selective",
            kernels="eager",
            attention="flash2",
            overlaps_data=True,
            repeats_products=0.5,
        ),
        Software(
            name="fsdp2-selective-compiled",
            kernels="compiled",
            attention="flash2",
            overlaps_data=True,
            repeats_products=0.5,
        ),
        Software(name="neox", kernels="neox", optimizer=16.0),
        Software(name="neox-flash", kernels="neox", attention="flash", optimizer=16.0),
        # ZeRO-3 of 2021. Its two properties follow from the 530B rows of arXiv 2104.04473, table 2:
        # 3.2 TB a step take 182 and 186 s, 17 GB/s of a card's 25, whether 1,120 or 2,240 ranks;
        # and 259 s beside 166 s of passes, so half of them is not hidden.
        Software(
            name="deepspeed-2021",
            kernels="fused",
            optimizer=16.0,
            overlaps_data=True,
            one_card=0.69,
            hides=0.5,
        ),
    )
}


def software_called(name: str) -> Software:
    """Returns a row of the table.

    Raises:
      UserError: there is none of that name.
    """
    if name not in SOFTWARE:
        raise UserError(
            f"--software={name} is not known.{near_matches(name, list(SOFTWARE))} It is one of: "
            f"{', '.join(SOFTWARE)}."
        )
    return SOFTWARE[name]
