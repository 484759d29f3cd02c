"""Predicted memory against the published formulas that it must reproduce."""

import dataclasses
import subprocess
import sys

import pytest

from tfbig.config import Config, ModelConfig, count_parameters, replace_fields
from tfbig.planner.fused_activations import fused_block_bytes
from tfbig.planner.memory import (
    MemoryOptions,
    Overhead,
    RankMemory,
    StateBytes,
    blocks_in_flight,
    peak,
    predict_memory,
)
from tfbig.variables import is_narrow, is_trained, num_trained_parameters, variable_specs
from trainers.partition import choose_partition

# Korthikanti et al. (arXiv 2205.05198), table 3: layers, width, heads, tensor degree, b.
KORTHIKANTI = {
    "22B": (48, 6144, 64, 4),
    "175B": (96, 12288, 96, 1),
    "530B": (105, 20480, 128, 1),
    "1T": (128, 25600, 160, 1),
}


def megatron(layers: int, width: int, heads: int, rows: int, **fields: object) -> Config:
    config = Config(
        model=ModelConfig(
            vocab_size=51200,
            max_length=2048,
            embed_dim=width,
            num_layers=layers,
            num_heads=heads,
            dropout=0.1,
            attention_dropout=0.1,
            embedding_dropout=0.1,
        )
    )
    values = {
        "strategy": "pipeline",
        "sequence_length": 2048,
        "global_batch": rows,
        "precision": "bfloat16",
        "attention": "plain",
        "tensor_parallel_degree": 8,
    }
    return replace_fields(config, values | fields)


@pytest.mark.parametrize(
    ("recompute", "sequence_parallel", "outside", "inside", "weights"),
    [
        ("none", False, 10, 24, 5),
        ("none", True, 0, 34, 5),
        ("attention", False, 10, 24, 0),
        ("attention", True, 0, 34, 0),
        ("block", False, 2, 0, 0),
        ("block", True, 0, 2, 0),
    ],
)
@pytest.mark.parametrize("name", KORTHIKANTI)
def test_korthikantis_table_2(name, recompute, sequence_parallel, outside, inside, weights):
    layers, width, heads, rows = KORTHIKANTI[name]
    config = megatron(layers, width, heads, rows, sequence_parallel=sequence_parallel)
    hidden = 2048 * rows * width
    expected = hidden * (outside + inside / 8 + weights * heads * 2048 / width / 8)
    assert fused_block_bytes(config, rows, recompute) == pytest.approx(expected, rel=1e-12)


# Pipeline ranks, chunks and microbatches of the same table; the printed GB of the first stage with
# TP, TP + SP, TP + SP + selective, full recomputation (scale.md's digits of figures 7 and 9).
FIRST_STAGE = {
    "22B": ((1, 1, 1), (63.6, 42.5, 10.3, 4.8)),
    "175B": ((8, 3, 64), (71.8, 44.5, 13.3, 6.2)),
    "530B": ((35, 3, 280), (122, 71.4, 24.8, 11.7)),
    "1T": ((64, 1, 512), (141, 82.2, 28.5, 13.4)),
}


@pytest.mark.parametrize("name", FIRST_STAGE)
def test_korthikantis_first_stage_to_the_printed_digits(name):
    layers, width, heads, rows = KORTHIKANTI[name]
    (ranks, chunks, microbatches), printed = FIRST_STAGE[name]
    fields = {
        "pipeline_parallel_degree": ranks,
        "pipeline": "interleaved" if chunks > 1 else "1f1b",
        "num_chunks": chunks,
        "microbatches": microbatches,
        "global_batch": rows * microbatches,
        "partition": ",".join([str(layers // ranks // chunks)] * ranks * chunks),
    }
    modes = (("none", False), ("none", True), ("attention", True), ("block", False))
    for (recompute, shared), expected in zip(modes, printed, strict=True):
        config = megatron(layers, width, heads, rows, sequence_parallel=shared, **fields)
        stages = choose_partition(config, rows).stages
        first = [(index, stage) for index, stage in enumerate(stages) if stage.rank == 0]
        held = blocks_in_flight(config, first) * fused_block_bytes(config, rows, recompute)
        digits = 1 if expected < 100 else 0
        assert round(held / 1e9, digits) == expected, (recompute, shared)


# ZeRO (arXiv 1910.02054), table 1: GB a device for N = 64 and Adam in mixed precision (K = 12).
ZERO = {
    7.5e9: (120, 31.4, 16.6, 1.88),
    128e9: (2048, 536, 284, 32),
    1e12: (16000, 4187, 2218, 250),
}


@pytest.mark.parametrize("parameters", ZERO)
@pytest.mark.parametrize("level", range(4))
def test_zeros_table(parameters, level):
    """The division of state over 64 ranks, to the printed digits."""
    config = Config(model=ModelConfig(num_layers=1))
    options = MemoryOptions(sharding_level=level, state=StateBytes(2, 2, 12))
    [rank] = predict_memory(config, 64, options)
    count = predict_memory(config, 1, MemoryOptions(state=StateBytes(1, 0, 0)))[0].weights
    state = (rank.weights + rank.gradients + rank.optimizer) / count * parameters / 1e9
    assert float(f"{state:.{3}g}" if state < 1000 else f"{state:.0f}") == pytest.approx(
        ZERO[parameters][level], rel=0.005
    )


def test_zero_never_needs_more_memory_at_a_higher_level():
    config = Config(model=ModelConfig(num_layers=8, embed_dim=1024))
    for precision in ("float32", "bfloat16"):
        run = replace_fields(config, {"precision": precision, "strategy": "horovod"})
        totals = [
            peak(predict_memory(run, 8, MemoryOptions(sharding_level=level))).total
            for level in range(4)
        ]
        assert totals == sorted(totals, reverse=True), precision


@pytest.mark.parametrize(
    ("level", "precision", "resting"),
    [
        (0, "float32", (4, 4, 8)),
        (0, "bfloat16", (4, 4, 8)),
        (1, "float32", (4, 4, 8 / 8)),
        (1, "bfloat16", (2, 2, 12 / 8)),
        (2, "bfloat16", (2, 4 / 8, 12 / 8)),
        (3, "float32", (4 / 8, 4 / 8, 8 / 8)),
        (3, "bfloat16", (4 / 8, 4 / 8, 8 / 8)),
    ],
)
def test_bytes_a_parameter_are_those_of_docs_memory(level, precision, resting):
    """Slopes over two depths: of a block's kernels and biases, without embeddings and norms."""
    found = slopes(level, precision)
    assert found == pytest.approx(resting, rel=0.002)


@pytest.mark.parametrize(("level", "held"), [(0, (6, 8, 8)), (1, (2, 6, 12 / 8))])
def test_totals_of_microbatches_are_wide_and_keep_narrow_weights(level, held):
    """With them, a microbatch's own gradients are there beside what they are added to."""
    assert slopes(level, "bfloat16", microbatches=2) == pytest.approx(held, rel=0.002)


def slopes(level: int, precision: str, **fields) -> list[float]:
    """Returns bytes a parameter of blocks: weights, gradients, optimizer, over 8 data ranks."""

    def of(layers: int) -> RankMemory:
        config = Config(model=ModelConfig(num_layers=layers, embed_dim=512))
        run = {"strategy": "horovod", "precision": precision, "global_batch": 16, **fields}
        options = MemoryOptions(sharding_level=level)
        return predict_memory(replace_fields(config, run), 8, options)[0]

    few, many = of(8), of(16)
    count = count_parameters(ModelConfig(num_layers=8, embed_dim=512))
    count = count_parameters(ModelConfig(num_layers=16, embed_dim=512)) - count
    return [
        (getattr(many, part) - getattr(few, part)) / count
        for part in ("weights", "gradients", "optimizer")
    ]


@pytest.mark.parametrize("tuning", [{"lora_rank": 8}, {"freeze": ("embedding_layer", "*/ffn/*")}])
def test_what_is_not_trained_has_a_weight_and_nothing_else(tuning):
    model = ModelConfig(num_layers=3, embed_dim=256, lora_rank=tuning.get("lora_rank", 0))
    config = Config(model=model)
    run = replace_fields(config, {"strategy": "horovod", "freeze": tuning.get("freeze", ())})
    trained = num_trained_parameters(model, run.optimizer.freeze)
    frozen = count_parameters(model) - trained
    assert 0 < trained < frozen
    for level, weights in enumerate((4, 4, 4, 4 / 8)):
        [rank] = predict_memory(run, 8, MemoryOptions(sharding_level=level))
        assert rank.weights == pytest.approx(trained * weights + frozen * weights)
        assert rank.optimizer == pytest.approx(8 * trained / (8 if level else 1))
        assert rank.gradients <= 8 * trained
    narrow = replace_fields(run, {"precision": "bfloat16"})
    # Kernels and biases: what is trained as it is used, the rest float32 and, where no units make
    # their own, with a copy of 16 bits while in use. Tables and norms are float32 in any case.
    of = {
        (is_trained(spec.path, model, run.optimizer.freeze), is_narrow(spec.path)): 0
        for spec in variable_specs(model)
    }
    for spec in variable_specs(model):
        kind = is_trained(spec.path, model, run.optimizer.freeze), is_narrow(spec.path)
        of[kind] += spec.num_elements
    wide = sum(count for (_, narrow_kind), count in of.items() if not narrow_kind)
    for level, copied in ((1, 6), (2, 4)):
        [rank] = predict_memory(narrow, 8, MemoryOptions(sharding_level=level))
        expected = 2 * of[True, True] + copied * of.get((False, True), 0) + 4 * wide
        assert rank.weights == pytest.approx(expected)


def test_recomputation_saves_in_its_order():
    config = megatron(96, 12288, 96, 16, pipeline_parallel_degree=8, microbatches=16)
    for kernels in ("fused", "tensorflow"):
        totals = []
        for recompute in ("none", "attention", "block", "group_4"):
            options = MemoryOptions(activation_checkpointing=recompute, kernels=kernels)
            totals.append(predict_memory(config, 1, options)[0].activations)
        assert totals == sorted(totals, reverse=True)


def test_schedules_differ_by_their_microbatches_in_flight():
    fields = {"pipeline_parallel_degree": 4, "microbatches": 16}
    options = MemoryOptions(kernels="fused")
    first = {
        schedule: predict_memory(
            megatron(16, 1024, 16, 16, pipeline=schedule, partition=partition, **fields), 1, options
        )[0].activations
        for schedule, partition in (
            ("1f1b", "4,4,4,4"),
            ("simple", "4,4,4,4"),
            ("interleaved", "2,2,2,2,2,2,2,2"),
        )
    }
    assert first["simple"] / first["1f1b"] == pytest.approx(16 / 4, rel=0.01)
    # 1 + (p - 1) / (p v), arXiv 2205.05198, section 4.2.3
    assert first["interleaved"] / first["1f1b"] == pytest.approx(1 + 3 / 8, rel=0.01)


def test_blockwise_attention_keeps_no_weights():
    fields = {"attention": "blockwise"}
    options = MemoryOptions()
    plain = predict_memory(megatron(4, 1024, 16, 4), 1, options)[0]
    blockwise = predict_memory(megatron(4, 1024, 16, 4, **fields), 1, options)[0]
    saved = 4 * 4 * 2048 * 2 * (2048 * 6 - 4)  # blocks, rows, positions, heads, a weight's bytes
    assert plain.activations - blockwise.activations == pytest.approx(saved)


def test_offloading_moves_bytes_to_the_host():
    config = megatron(8, 1024, 16, 8)
    base = MemoryOptions(activation_checkpointing="block")
    moved = dataclasses.replace(base, offload_activations=True, offload_optimizer_state=True)
    [before], [after] = predict_memory(config, 1, base), predict_memory(config, 1, moved)
    assert after.optimizer == 0 and after.activations < before.activations
    assert after.host == pytest.approx(
        before.optimizer + before.activations - after.activations, rel=1e-9
    )
    assert after.total < before.total


def test_overhead_is_counted_once_a_group():
    config = megatron(8, 1024, 16, 8)
    plain = predict_memory(config, 2)[0]
    more = predict_memory(config, 2, overhead=Overhead(context=1e9, communicator=1e8))[0]
    assert more.total - plain.total == pytest.approx(1e9 + 3e8)  # world, data, tensor


def test_it_imports_without_tensorflow():
    program = (
        "import sys; sys.modules['tensorflow'] = None; import tfbig.planner.memory as m;"
        "from tfbig.config import Config; print(m.predict_memory(Config(), 1)[0].total > 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "True", done.stderr
