"""Published training runs: layout, what was measured, and where it is written.

Seconds are of one optimizer step; gigabytes as their source prints them. Where a source prints
TFLOP/s, seconds follow from its own FLOP formula. `fitted` rows are those that the constants of
tfbig/planner/constants.json were fitted on: they count in no bar.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from tfbig.config import Config, ModelConfig, replace_fields
from tfbig.planner.cluster import Cluster, load_constants, make_cluster
from tfbig.planner.memory import MemoryOptions, Overhead
from tfbig.planner.software import Software, software_called

SC21 = "arXiv 2104.04473, table 1; layouts: Megatron-LM, examples/academic_paper_scripts/sc21"
SELECTIVE = "arXiv 2205.05198, table 5; layouts: table 3"
BLOOM = "github.com/bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md"
TITAN = "github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
MPT = "github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md"
PYTHIA = "GPU hours / 143,000 steps, arXiv 2304.01373, table 6; layouts: its NeoX configurations"
ZERO_BUBBLE = "arXiv 2401.10241, tables 3 and 4"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One published run."""

    name: str
    source: str
    cluster: str
    software: str
    layers: int
    width: int
    heads: int
    vocabulary: int
    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    rows: int = 1  # of a microbatch
    batch: int
    length: int = 2048
    recompute: str = "none"
    level: int = 0
    precision: str = "bfloat16"
    seconds: float
    gigabytes: float = 0.0
    counts_tensors: bool = False  # memory as the allocator counts it, not as the driver does
    dropout: float = 0.1
    network_gbps: float = 0.0
    network_fraction: float = 0.0  # of it, as measured there
    peak_of: str = ""  # precision whose peak the products have, if not the run's own
    fitted: bool = False
    model: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)

    def config(self) -> Config:
        data = self.machines().num_devices // (self.tensor * self.pipeline)
        model = {
            "vocab_size": self.vocabulary,
            "max_length": self.length,
            "embed_dim": self.width,
            "num_layers": self.layers,
            "num_heads": self.heads,
            "dropout": self.dropout,
            "attention_dropout": self.dropout,
            "embedding_dropout": self.dropout,
        }
        config = Config(model=ModelConfig(**(model | self.model)))
        values = {
            "strategy": "pipeline",
            "pipeline_parallel_degree": self.pipeline,
            "tensor_parallel_degree": self.tensor,
            "microbatches": self.batch // (data * self.rows),
            "global_batch": self.batch,
            "sequence_length": self.length,
            "precision": self.precision,
            "attention": "plain" if self.program().attention == "own" else "blockwise",
            "pipeline": "interleaved" if self.chunks > 1 else "1f1b",
            "num_chunks": self.chunks,
            "partition": self.partition(),
        }
        return replace_fields(config, values | self.fields)

    def partition(self) -> str:
        """Equal stages; a remainder goes to the middle, away from embedding and head."""
        stages = self.pipeline * self.chunks
        if stages == 1:
            return ""
        whole, rest = divmod(self.layers, stages)
        counts = [whole] * stages
        first = (stages - rest) // 2
        for index in range(first, first + rest):
            counts[index] += 1
        return ",".join(map(str, counts))

    def machines(self) -> Cluster:
        cluster = make_cluster(self.cluster, load_constants(), network_gbps=self.network_gbps)
        if self.peak_of:
            peak = {self.precision: cluster.device.peak_flops(self.peak_of)}
            device = dataclasses.replace(cluster.device, peak=peak)
            cluster = dataclasses.replace(cluster, device=device)
        if not self.network_fraction:
            return cluster
        return dataclasses.replace(cluster, network_fraction=self.network_fraction)

    def program(self) -> Software:
        return software_called(self.software)

    def options(self) -> MemoryOptions:
        software, config = self.program(), self.config()
        return MemoryOptions(
            sharding_level=self.level,
            activation_checkpointing=self.recompute,
            kernels="fused",
            state=software.state(config, self.level),
        )

    def overhead(self) -> Overhead:
        return Overhead() if self.counts_tensors else self.program().overhead(self.machines())


def sc21_seconds(layers, width, vocabulary, batch, gpus, teraflops, length=2048, again=True):
    """Returns seconds of the paper's formula: 96 B s L h^2 (1 + s / 6h + V / 16 L h) FLOPs."""
    factor, head = (96, 16) if again else (72, 12)
    flops = factor * batch * length * layers * width**2
    flops *= 1 + length / (6 * width) + vocabulary / (head * layers * width)
    return flops / gpus / teraflops / 1e12


def megatron(name, layers, width, heads, cluster, tensor, pipeline, rows, batch, seconds, **more):
    values = {
        "source": SC21,
        "software": "megatron",
        "precision": "float16",
        "vocabulary": 51200,
        "recompute": "block",
    }
    return Run(
        name=name,
        layers=layers,
        width=width,
        heads=heads,
        cluster=cluster,
        tensor=tensor,
        pipeline=pipeline,
        rows=rows,
        batch=batch,
        seconds=seconds,
        **(values | more),
    )


def table1(name, layers, width, heads, gpus, tensor, pipeline, rows, batch, teraflops, **more):
    seconds = sc21_seconds(layers, width, 51200, batch, gpus, teraflops)
    return megatron(
        name,
        layers,
        width,
        heads,
        f"a100-80:{gpus}",
        tensor,
        pipeline,
        rows,
        batch,
        seconds,
        **more,
    )


def korthikanti(name, layers, width, heads, gpus, pipeline, chunks, rows, batch, seconds):
    """Two rows: selective recomputation with shared positions, and full recomputation."""
    shape = (layers, width, heads, f"a100-80:{gpus}", 8, pipeline, rows, batch)
    more = {"chunks": chunks, "source": SELECTIVE}
    shared = {"sequence_parallel": True}
    return [
        megatron(name, *shape, seconds[0], recompute="attention", fields=shared, **more),
        megatron(f"{name} full", *shape, seconds[1], recompute="block", **more),
    ]


def bloom(name, layers, heads, tensor, pipeline, rows, batch, seconds, gigabytes, **more):
    values = {
        "source": BLOOM,
        "software": "megatron-deepspeed",
        "precision": "float16",
        "level": 1,
        "recompute": "block",
        "dropout": 0.0,
        "network_gbps": 400,
        # All-reduce there: 44 to 57 of 400 Gb/s (github.com/stas00/ml-engineering, network).
        "network_fraction": 57 / 400,
    }
    return Run(
        name=name,
        layers=layers,
        width=14336,
        heads=heads,
        vocabulary=250880,
        cluster="a100-80:384",
        tensor=tensor,
        pipeline=pipeline,
        rows=rows,
        batch=batch,
        seconds=seconds,
        gigabytes=gigabytes,
        **(values | more),
    )


def pythia(name, layers, width, heads, vocabulary, gpus, tensor, rows, seconds):
    return Run(
        name=name,
        source=PYTHIA,
        software="neox-flash",
        layers=layers,
        width=width,
        heads=heads,
        vocabulary=vocabulary,
        cluster=f"a100-40:{gpus}",
        network_gbps=400,
        tensor=tensor,
        rows=rows,
        batch=1024,
        level=1,
        recompute="block",
        precision="float16",
        dropout=0.0,
        seconds=seconds,
        model=NEOX,
    )


NEOX = {
    "position_embedding": "rotary",
    "rotary_fraction": 0.25,
    "parallel_residual": True,
    "tied_head": False,
}
# Llama 3.1 8B shares keys and values among heads and gates its feed-forward layer; this width gives
# a block the same parameters and products: 2 D^2 + 2 D 1024 + 3 D 14336 = 4 D^2 + 2 D F.
LLAMA_8B = {
    "position_embedding": "rotary",
    "tied_head": False,
    "feed_forward_dim": 18432,
    "max_length": 8192,
}


def titan(name, gpus, batch, tokens, software, fitted=False):
    return Run(
        name=name,
        source=TITAN,
        software=software,
        layers=32,
        width=4096,
        heads=32,
        vocabulary=128256,
        cluster=f"h100-96:{gpus}",
        rows=2,
        batch=batch,
        length=8192,
        level=3,
        dropout=0.0,
        seconds=batch * 8192 / tokens / gpus,
        model=LLAMA_8B,
        fitted=fitted,
    )


def mpt(name, layers, width, heads, device, gpus, rows, batch, tokens, recompute="block"):
    return Run(
        name=name,
        source=MPT,
        software="fsdp",
        layers=layers,
        width=width,
        heads=heads,
        vocabulary=50368,
        cluster=f"{device}:{gpus}",
        network_gbps=1600 if device.startswith("a100") else 3200,
        rows=rows,
        batch=batch,
        level=3,
        recompute=recompute,
        dropout=0.0,
        seconds=batch * 2048 / tokens / gpus,
    )


def zero_bubble(name, layers, width, heads, gpus, rows, microbatches, samples, gigabytes):
    return Run(
        name=name,
        source=ZERO_BUBBLE,
        software="megatron-bf16",
        layers=layers,
        width=width,
        heads=heads,
        vocabulary=50304,
        cluster=f"a100-80:{gpus}",
        pipeline=gpus,
        rows=rows,
        batch=rows * microbatches,
        length=1024,
        seconds=rows * microbatches / samples / gpus,
        gigabytes=gigabytes,
        counts_tensors=True,
    )


def core(name, layers, width, heads, gpus, tensor, pipeline, chunks, batch, teraflops):
    """Megatron Core on H100; its microbatches are not published, 1 is our guess."""
    seconds = sc21_seconds(layers, width, 131072, batch, gpus, teraflops, 4096, again=False)
    return Run(
        name=name,
        source="github.com/NVIDIA/Megatron-LM, README.md of 2024",
        software="megatron-core",
        layers=layers,
        width=width,
        heads=heads,
        vocabulary=131072,
        cluster=f"h100-80:{gpus}",
        tensor=tensor,
        pipeline=pipeline,
        chunks=chunks,
        batch=batch,
        length=4096,
        level=1,
        dropout=0.0,
        seconds=seconds,
        model={"tied_head": False},
        fields={"sequence_parallel": True},
    )
