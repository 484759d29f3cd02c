"""How a step runs on many devices, as a frozen dataclass. TensorFlow-free."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How a step runs on many devices; options that SageMaker had keep its names."""

    strategy: str = "single"
    """How processes and devices share the work (trainers/__init__.py lists the strategies)."""
    microbatches: int = 1
    """Forward passes per rank and step; microbatch_size = global_batch / (replicas x this)."""
    pipeline_parallel_degree: int = 1
    """Stages the blocks are cut into."""
    tensor_parallel_degree: int = 1
    """Devices that share each layer."""
    placement_strategy: str = "cluster"
    """cluster (DPT), spread (TPD) or a permutation of D, P, T; the last letter's ranks are near."""
    pipeline: Literal["1f1b", "simple", "interleaved"] = "1f1b"
    """Order of the microbatches' passes; simple is GPipe's."""
    num_chunks: int = 2
    """Parts of the model on each rank of an interleaved pipeline."""
    active_microbatches: int = 0
    """Most microbatches a rank holds activations of at a time; 0 leaves it to the schedule."""
    memory_weight: float = 0.5
    """What the partition balances: 0 only computation, 1 only memory."""
    partition: str = ""
    """Blocks of each stage by hand, e.g. 5,4,3; empty means by the cost model."""
    sequence_parallel: bool = False
    """Whether ranks of a tensor group also share norms and dropout, along time."""
    gradient_reduction: Literal["auto", "tape", "buckets"] = "auto"
    """Horovod's DistributedGradientTape or our flat buckets; auto takes tape where it can."""
    bucket_megabytes: int = 32
    """Size of one flat gradient bucket."""
    shard_optimizer_state: bool = False
    """Whether data ranks share the optimizer's slots instead of each keeping all (ZeRO-1)."""
    shard_gradients: bool = False
    """Whether they share the summed gradients too (ZeRO-2)."""
    shard_parameters: bool = False
    """Whether they share the weights too, and gather a block's before its use (ZeRO-3)."""
    activation_checkpointing: str = "none"
    """What backward makes again instead of keeping it: none, block, group_N (blocks), attention."""
    offload_activations: bool = False
    """Whether the inputs of checkpointed blocks wait in host memory for their backward pass."""
    activation_loading_horizon: int = 4
    """How many checkpointed groups before its use an input begins to come back to the device."""
    offload_optimizer_state: bool = False
    """Whether slots lie in host memory, where the update is then made."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Arithmetic of the model; variables and optimizer state stay float32."""
    tf32: bool = True
    """Whether GPUs that can round the inputs of float32 matrix products to 10 bits of mantissa."""
    attention: Literal["auto", "plain", "blockwise", "plain_xla", "blockwise_xla"] = "auto"
    """blockwise keeps nothing of size T x T; auto: on CPU from T = 1024 on, on GPU by a trial."""
    jit_compile: bool = False
    """Whether XLA compiles the forward and backward pass."""
    num_devices: int = 0
    """Devices of one mirrored or multi_worker process: 0 is all GPUs; on a CPU they are logical."""
    deterministic: bool = False
    """Bit-equal runs: TF's deterministic kernels and Horovod without fusion; slower."""
    num_threads: int = 0
    """CPU threads of one process; 0 means the machine's cores shared among the local ranks."""

    @property
    def sharding_level(self) -> int:
        """ZeRO's stage (arXiv 1910.02054): 1 to 3, each with what those below share; 0 is none."""
        shared = (self.shard_optimizer_state, self.shard_gradients, self.shard_parameters)
        return max(stage for stage in range(4) if stage == 0 or shared[stage - 1])

    @property
    def offload_horizon(self) -> int | None:
        """The loading horizon of offloaded activations; None where they are not."""
        return self.activation_loading_horizon if self.offload_activations else None
