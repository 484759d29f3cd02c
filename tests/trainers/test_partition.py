"""Which blocks a stage gets."""

import itertools

import pytest

from tfbig.config import Config, count_parameters, replace_fields
from tfbig.errors import UserError
from trainers.partition import Partition, choose_partition


def config_with(**fields) -> Config:
    base = {"num_layers": 12, "pipeline_parallel_degree": 4, "microbatches": 8, "vocab_size": 512}
    return replace_fields(Config(), base | {"strategy": "pipeline"} | fields)


def blocks(partition: Partition) -> list[int]:
    return [stop - first for first, stop in (stage.block_range for stage in partition.stages)]


@pytest.mark.parametrize(
    ("layers", "stages", "weight"), list(itertools.product((4, 7, 12), (1, 2, 4), (0.0, 0.5, 1.0)))
)
def test_every_block_has_one_stage(layers, stages, weight):
    config = config_with(num_layers=layers, pipeline_parallel_degree=stages, memory_weight=weight)
    partition = choose_partition(config, 1)
    ranges = [stage.block_range for stage in partition.stages]
    assert ranges[0][0] == 0 and ranges[-1][1] == layers and len(ranges) == stages
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
    assert min(blocks(partition)) >= 1


def cheapest_by_search(config: Config) -> float:
    """The least possible work of the busiest stage, over all ways to cut."""
    layers, stages = config.model.num_layers, config.parallel.pipeline_parallel_degree
    best = float("inf")
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        bounds = (0, *cuts, layers)
        counts = ",".join(str(b - a) for a, b in itertools.pairwise(bounds))
        by_hand = choose_partition(replace_fields(config, {"partition": counts}), 1)
        best = min(best, max(stage.flops for stage in by_hand.stages))
    return best


@pytest.mark.parametrize("vocab_size", [64, 4096, 50257])
@pytest.mark.parametrize(("layers", "stages"), [(6, 2), (9, 3), (8, 4)])
def test_computation_is_balanced_as_well_as_can_be(vocab_size, layers, stages):
    config = config_with(
        num_layers=layers,
        pipeline_parallel_degree=stages,
        vocab_size=vocab_size,
        memory_weight=0.0,
    )
    partition = choose_partition(config, 1)
    assert max(s.flops for s in partition.stages) == pytest.approx(cheapest_by_search(config))


def test_a_heavy_head_takes_blocks_from_the_last_stage():
    light = blocks(choose_partition(config_with(vocab_size=64, memory_weight=0.0), 1))
    heavy = blocks(choose_partition(config_with(vocab_size=50257, memory_weight=0.0), 1))
    assert light == [3, 3, 3, 3]
    assert heavy[-1] < 3


def test_memory_weight_moves_blocks_off_the_first_stage():
    # Under 1F1B the first stage holds the most microbatches.
    fields = {"sequence_length": 256, "max_length": 256, "microbatches": 16}
    compute = blocks(choose_partition(config_with(memory_weight=0.0, **fields), 16))
    memory = blocks(choose_partition(config_with(memory_weight=1.0, **fields), 16))
    assert compute[0] == 3 and memory[0] < 3


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stages", [1, 3])
def test_parameters_add_up_to_the_model(tied, stages):
    config = config_with(pipeline_parallel_degree=stages, tied_head=tied)
    partition = choose_partition(config, 1)
    copies = config.model.vocab_size * config.model.embed_dim if tied and stages > 1 else 0
    total = sum(stage.num_parameters for stage in partition.stages)
    assert total == count_parameters(config.model) + copies


def test_tensor_parallelism_divides_what_is_sharded():
    whole = choose_partition(config_with(pipeline_parallel_degree=1), 1).stages[0]
    halved = choose_partition(
        config_with(pipeline_parallel_degree=1, tensor_parallel_degree=2), 1
    ).stages[0]
    assert halved.flops == pytest.approx(whole.flops / 2)
    assert whole.num_parameters / 2 < halved.num_parameters < 0.55 * whole.num_parameters


def test_by_hand():
    partition = choose_partition(config_with(partition="1,2,4,5"), 1)
    assert blocks(partition) == [1, 2, 4, 5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3,3,6", "names 3 stages with 12 blocks in all; it must name 4"),
        ("3,3,3,4", "13 blocks in all; it must name 4, each of at least 1 block, with 12"),
        ("0,4,4,4", "at least 1 block"),
        ("three", "no list of blocks"),
    ],
)
def test_by_hand_must_be_a_partition(text, message):
    with pytest.raises(UserError, match=message):
        choose_partition(config_with(partition=text), 1)


def test_interleaved_stages_go_round_the_ranks():
    config = config_with(pipeline="interleaved", num_chunks=3)
    partition = choose_partition(config, 1)
    assert [stage.rank for stage in partition.stages] == [0, 1, 2, 3] * 3


def test_table_names_every_stage():
    partition = choose_partition(config_with(), 1)
    lines = partition.table().splitlines()
    first, stop = partition.stages[1].block_range
    assert len(lines) == 5 and f" {first}-{stop - 1} " in lines[2]
    assert len(partition.to_dict()) == 4


def test_the_cost_model_knows_where_attention_becomes_blockwise():
    import ast
    from pathlib import Path

    import tfbig
    from trainers.activations import BLOCKWISE_FROM

    source = Path(tfbig.__file__).with_name("model") / "blockwise_attention.py"
    values = {
        node.targets[0].id: node.value.value
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }
    assert values["FASTER_FROM"] == BLOCKWISE_FROM
