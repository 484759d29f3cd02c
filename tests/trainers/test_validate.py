"""Sizes that don't fit together are refused with the arithmetic."""

import itertools

import pytest

from tfbig.config import Config, replace_fields
from tfbig.errors import UserError
from tfbig.validation import problems
from trainers import check_strategy
from trainers.validate import check_data_parallel_only, check_mesh_fits, derive_microbatch_size

SMALL = {"strategy": "pipeline", "num_layers": 4, "num_heads": 4, "embed_dim": 64}


def config_with(**fields) -> Config:
    return replace_fields(Config(), SMALL | fields)


def test_microbatch_size():
    assert derive_microbatch_size(64, 4, 8) == 2
    assert derive_microbatch_size(1, 1, 1) == 1


@pytest.mark.parametrize(
    ("batch", "replicas", "microbatches", "message"),
    [
        (10, 2, 2, r"10 is no multiple of 2 replicas x 2 microbatches = 4: .* 8 or 12"),
        (3, 2, 4, r"3 is no multiple of 2 replicas x 4 microbatches = 8: .* of 8\."),
    ],
)
def test_microbatches_that_do_not_divide(batch, replicas, microbatches, message):
    with pytest.raises(UserError, match=message):
        derive_microbatch_size(batch, replicas, microbatches)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pipeline_parallel_degree": 5}, "5 stages need at least 5 blocks, but the model has 4"),
        (
            {"pipeline_parallel_degree": 3, "pipeline": "interleaved"},
            "3 ranks x 2 chunks need at least 6 blocks, but the model has 4: take at most 2",
        ),
        ({"tensor_parallel_degree": 3}, r"3 does not divide --num_heads=4 \(4 = 3 x 1 \+ 1\)"),
        (
            {"tensor_parallel_degree": 4, "feed_forward_dim": 102},
            r"does not divide --feed_forward_dim=102 \(102 = 4 x 25 \+ 2\): take 3",
        ),
        (
            {"tensor_parallel_degree": 4, "sequence_parallel": True, "sequence_length": 30},
            r"30 = 4 x 7 \+ 2",
        ),
        ({"gradient_reduction": "tape"}, "has no effect with --strategy=pipeline"),
    ],
)
def test_models_that_cannot_be_cut_so(fields, message):
    with pytest.raises(UserError, match=message):
        check_mesh_fits(config_with(**fields))


def test_what_fits_passes():
    check_mesh_fits(config_with(pipeline_parallel_degree=4, tensor_parallel_degree=4))
    check_mesh_fits(config_with(pipeline_parallel_degree=2, pipeline="interleaved"))
    for pipeline in ("1f1b", "interleaved"):
        degrees = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2}
        check_mesh_fits(config_with(**degrees, pipeline=pipeline, microbatches=4))


@pytest.mark.parametrize("field", ["pipeline_parallel_degree", "tensor_parallel_degree"])
def test_data_parallel_strategies_name_the_one_that_can(field):
    with pytest.raises(UserError, match=f"--{field}=2: use --strategy=pipeline"):
        check_data_parallel_only(config_with(strategy="horovod", **{field: 2}))
    check_data_parallel_only(config_with(strategy="horovod"))


SHARDED = [
    # (strategy, flag, pipeline degree, tensor degree)
    *(("pipeline", "shard_optimizer_state", p, t) for p in (1, 2) for t in (1, 2)),
    *(("pipeline", flag, 1, t) for flag in ("shard_gradients", "shard_parameters") for t in (1, 2)),
    ("horovod", "shard_optimizer_state", 1, 1),
    ("horovod", "shard_gradients", 1, 1),
    ("horovod", "shard_parameters", 1, 1),
]


@pytest.mark.parametrize(("strategy", "flag", "pipeline_degree", "tensor_degree"), SHARDED)
def test_sharding_is_never_refused(strategy, flag, pipeline_degree, tensor_degree):
    options = itertools.product(
        ("none", "block"), ("float32", "bfloat16", "float16"), (True, False), (1, 4)
    )
    for checkpointing, precision, tied, microbatches in options:
        fields = {
            "strategy": strategy,
            flag: True,
            "pipeline_parallel_degree": pipeline_degree,
            "tensor_parallel_degree": tensor_degree,
            "activation_checkpointing": checkpointing,
            "precision": precision,
            "tied_head": tied,
            "microbatches": microbatches,
            "global_batch": 16,
        }
        config = replace_fields(Config(), fields)
        assert list(problems(config)) == [], fields
        check_strategy(config)
