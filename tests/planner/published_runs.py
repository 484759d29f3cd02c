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
    fitted: bool = False
    is_bound: bool = True  # whether it counts in the bar
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


MT_NLG = {
    "source": "arXiv 2201.11990, section 2.3",
    "software": "megatron-deepspeed-bf16",
    "precision": "bfloat16",
}


FITTED = [
    table1("V1", 24, 2304, 24, 32, 1, 1, 16, 512, 137, fitted=True),
    table1("V2", 30, 3072, 32, 64, 2, 1, 16, 512, 138, fitted=True),
    table1("V3", 36, 4096, 32, 128, 4, 1, 16, 512, 142, fitted=True),
    table1("V4", 40, 6144, 48, 256, 8, 1, 8, 1024, 135, fitted=True),
    titan("V49", 8, 16, 5762, "fsdp2-selective", fitted=True),
    titan("V49 compiled", 8, 16, 6667, "fsdp2-selective-compiled", fitted=True),
]
# The deepspeed-2021 row of tfbig/planner/software.py follows from these.
FITTED += [
    megatron(
        f"530B ZeRO-3 {gpus}",
        105,
        20480,
        128,
        f"a100-80:{gpus}",
        1,
        1,
        rows,
        batch,
        sc21_seconds(105, 20480, 51200, batch, gpus, teraflops),
        software="deepspeed-2021",
        level=3,
        source="arXiv 2104.04473, table 2",
        fitted=True,
    )
    for gpus, rows, batch, teraflops in (
        (640, 4, 2560, 138),
        (1120, 2, 2240, 98),
        (2240, 1, 2240, 48),
    )
]
BOUND = [
    table1("V5", 48, 8192, 64, 512, 8, 2, 4, 1536, 138),
    table1("V6", 60, 10240, 80, 1024, 8, 4, 2, 1792, 140, chunks=3),
    table1("V7", 80, 12288, 96, 1536, 8, 8, 2, 2304, 148, chunks=2),
    table1("V10", 128, 25600, 160, 3072, 8, 64, 1, 3072, 163),
    megatron("V11", 96, 12288, 96, "a100-80:1024", 8, 16, 1, 1536, 32.0),
    *korthikanti("V12", 48, 6144, 64, 8, 1, 1, 4, 4, (1.10, 1.42)),
    *korthikanti("V13", 96, 12288, 96, 64, 8, 3, 1, 64, (13.75, 18.13)),
    *korthikanti("V14", 105, 20480, 128, 280, 35, 3, 1, 280, (37.83, 49.05)),
    *korthikanti("V15", 128, 25600, 160, 512, 64, 1, 1, 512, (71.49, 94.42)),
    megatron("V17", 105, 20480, 128, "a100-80:2240", 8, 35, 1, 1920, 60.1, **MT_NLG),
    megatron("V19", 105, 20480, 128, "a100-80:3360", 8, 35, 1, 1920, 44.4, **MT_NLG),
    *(
        megatron(
            f"V21 {gpus}",
            96,
            12288,
            96,
            f"a100-80:{gpus}",
            1,
            1,
            rows,
            1536,
            sc21_seconds(96, 12288, 51200, 1536, gpus, teraflops),
            software="deepspeed-2021",
            level=3,
            source="arXiv 2104.04473, table 2",
        )
        for gpus, rows, teraflops in ((384, 4, 144), (768, 2, 88), (1536, 1, 44))
    ),
    bloom(
        "V22",
        70,
        112,
        4,
        12,
        2,
        2048,
        104.5,
        59,
        software="megatron-deepspeed-bf16",
        precision="bfloat16",
        fields={"partition": "5,6,6,6,6,6,6,6,6,6,6,5"},
    ),
    bloom("V25", 72, 64, 8, 12, 4, 2048, 117.1, 49),
    bloom("V28", 72, 64, 2, 12, 2, 2048, 112.5, 63),
    bloom("V29", 72, 64, 8, 2, 2, 2016, 136.1, 76),
    pythia("V33", 36, 5120, 40, 50688, 256, 4, 8, 7.11),
    pythia("V35", 32, 2560, 32, 50304, 64, 1, 8, 5.60),
    pythia("V37", 24, 1024, 16, 50304, 32, 1, 32, 2.00),
    Run(
        name="V38",
        source="arXiv 2204.06745, section 2.3; layout: github.com/EleutherAI/gpt-neox, 20B.yml",
        software="neox",
        layers=44,
        width=6144,
        heads=64,
        vocabulary=50432,
        cluster="a100-40:96",
        network_gbps=800,
        tensor=2,
        pipeline=4,
        rows=4,
        batch=1536,
        level=1,
        recompute="block",
        precision="float16",
        dropout=0.0,
        # GPT-NeoX printed FLOP/s by 6 N + 60 s L h a token (get_flops of its megatron/utils.py).
        seconds=1536 * 2048 * (6 * 20.55e9 + 60 * 2048 * 44 * 6144) / 96 / 117e12,
        model=NEOX,
    ),
    titan("V50", 128, 256, 5605, "fsdp2-selective"),
    titan("V50 compiled", 128, 256, 6514, "fsdp2-selective-compiled"),
    mpt("V52", 32, 4096, 32, "a100-80", 8, 6, 96, 4641, recompute="none"),
    mpt("V54", 80, 8192, 64, "a100-40", 128, 4, 512, 376),
    mpt("V55", 80, 8192, 64, "h100-80", 512, 8, 4096, 1007),
    zero_bubble("V56", 22, 2304, 24, 8, 6, 24, 11.8, 30),
    zero_bubble("V57", 46, 5120, 40, 16, 1, 48, 1.40, 32),
]
# Rows that ran out of memory on 80 GB.
TOO_LARGE = [
    bloom("V30 t8 p1", 72, 64, 8, 1, 1, 2016, 1.0, 0),
    bloom("V30 t2 p6", 72, 64, 2, 6, 1, 2048, 1.0, 0),
]
# Rows of the same sources beyond the project's table: held out from every choice.
MORE = [
    *(
        megatron(
            f"{name} {gpus}",
            *shape,
            f"a100-80:{gpus}",
            8,
            pipeline,
            1,
            batch,
            sc21_seconds(shape[0], shape[1], 51200, batch, gpus, teraflops),
            source="arXiv 2104.04473, table 2",
        )
        for name, shape, pipeline, batch, rows in (
            ("V20", (96, 12288, 96), 12, 1536, ((384, 153), (768, 149), (1536, 141))),
            ("530B", (105, 20480, 128), 35, 2240, ((560, 171), (1120, 167), (2240, 159))),
        )
        for gpus, teraflops in rows
    ),
    *(
        bloom(f"BLOOM t{t} p{p} b{b}", 72, 64, t, p, b, batch, seconds, gigabytes)
        for t, p, b, batch, seconds, gigabytes in (
            (8, 6, 4, 2048, 114.11, 55),
            (8, 8, 4, 2016, 113.16, 52),
            (8, 4, 2, 2016, 125.52, 53),
            (8, 4, 4, 2016, 114.81, 59),
            (4, 12, 4, 2048, 111.89, 60),
            (4, 12, 2, 2048, 110.48, 44),
            (4, 6, 4, 2048, 117.11, 75),
            (2, 24, 1, 2048, 119.53, 44),
            (2, 24, 2, 2048, 122.75, 53),
        )
    ),
    mpt("MPT-13B 8", 40, 5120, 40, "a100-80", 8, 2, 48, 2262, recompute="none"),
    mpt("MPT-30B 8", 48, 7168, 56, "a100-80", 8, 3, 504, 916),
    mpt("MPT-70B 64", 80, 8192, 64, "a100-80", 64, 8, 2048, 410),
    mpt("MPT-30B 128", 48, 7168, 56, "a100-40", 128, 6, 768, 865),
    mpt("MPT-7B 8 H100", 32, 4096, 32, "h100-80", 8, 6, 48, 10643, recompute="none"),
    mpt("MPT-13B 64 H100", 40, 5120, 40, "h100-80", 64, 2, 128, 4800, recompute="none"),
    mpt("MPT-30B 32 H100", 48, 7168, 56, "h100-80", 32, 14, 1344, 2308),
    mpt("MPT-70B 64 H100", 80, 8192, 64, "h100-80", 64, 8, 2048, 1039),
]
