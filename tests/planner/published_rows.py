"""Rows of published runs: fitted, bound by the bars, reported, beyond the table."""

from tests.planner.published_runs import (
    NEOX,
    Run,
    bloom,
    core,
    korthikanti,
    megatron,
    mpt,
    pythia,
    sc21_seconds,
    table1,
    titan,
    zero_bubble,
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
V100 = "github.com/NVIDIA/Megatron-LM, README.md of 2020"
# Reported without a bar: products of V100 and of float8 are fitted on nothing.
REPORTED = [
    megatron("V59", 24, 1920, 15, "v100-32:1", 1, 1, 8, 8, 1.121, source=V100, length=1024),
    megatron("V60", 42, 4096, 32, "v100-32:8", 8, 1, 8, 8, 1.407, source=V100, length=1024),
    megatron(
        "V48",
        96,
        12288,
        96,
        "h100-80:128",
        4,
        8,
        1,
        256,
        256 * 2048 / 716 / 128,
        chunks=6,
        source="NVIDIA NeMo 24.12, performance summary",
        software="megatron-bf16",
        precision="bfloat16",
        peak_of="float8",
        recompute="attention",
        fields={"sequence_parallel": True},
    ),
]
# Rows that ran out of memory on 80 GB.
TOO_LARGE = [
    bloom("V30 t8 p1", 72, 64, 8, 1, 1, 2016, 1.0, 0),
    bloom("V30 t2 p6", 72, 64, 2, 6, 1, 2048, 1.0, 0),
]
# Rows of the same sources beyond the project's table.
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
    core("V44", 30, 4096, 32, 96, 2, 1, 1, 192, 466),
    core("V47", 112, 18432, 144, 6144, 8, 16, 7, 3072, 460),
]
