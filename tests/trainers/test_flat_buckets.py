"""Flat buckets: every element has one owner, and decays by its own variable's rule."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfbig.config import ModelConfig
from tfbig.variables import variable_rule, variable_specs
from trainers.bucket_plan import plan_buckets
from trainers.flat_buckets import flat_bucket, flat_buckets, model_sizes
from trainers.model_units import model_units, unit_buckets

SIZES = st.dictionaries(st.text("abcdef", min_size=1), st.integers(1, 9), min_size=1, max_size=5)


@settings(deadline=None, max_examples=150)
@given(SIZES, st.integers(1, 5), st.data())
def test_parts_tile_each_variable_once_and_split_at_the_decay(sizes, num_parts, data):
    decayed = {path: data.draw(st.booleans()) for path in sizes}
    bucket = flat_bucket(list(sizes), sizes, decayed, num_parts)
    assert 0 <= bucket.padding < num_parts
    owners: dict[str, list[int]] = {path: [] for path in sizes}
    for part in range(num_parts):
        used = 0
        for piece in bucket.pieces(part):
            assert piece.offset == used, "no gaps between pieces"
            used += piece.stop - piece.start
            owners[piece.path] += range(piece.start, piece.stop)
            # Whether an element decays is where it lies in the part.
            first_not = bucket.decayed_in(part)
            for offset in range(piece.offset, used):
                assert (offset < first_not) == decayed[piece.path]
        assert used <= bucket.part_size
    assert owners == {path: list(range(size)) for path, size in sizes.items()}


MODEL = {"vocab_size": 61, "embed_dim": 8, "num_layers": 5, "num_heads": 2}


@pytest.mark.parametrize("group_size", [1, 2, 7])
@pytest.mark.parametrize("tied", [True, False])
def test_units_hold_every_variable_and_buckets_hold_it_once(group_size, tied):
    model = ModelConfig(**MODEL, tied_head=tied, position_embedding="rotary")
    units = model_units(model, group_size)
    paths = {spec.path for spec in variable_specs(model)}
    assert {path for unit in units for path in unit.paths} == paths
    assert [u.blocks for u in units if u.blocks[1]][-1][1] == model.num_layers
    assert units[0].has_embedding and units[-1].has_head
    buckets = unit_buckets(unit.trained for unit in units)
    assert not any(unit.frozen for unit in units)
    assert sorted(path for bucket in buckets for path in bucket) == sorted(paths)
    for bucket in buckets:
        users = [[path in unit.paths for unit in units] for path in bucket]
        assert all(row == users[0] for row in users), "a bucket is used whole or not at all"


def test_the_models_buckets_share_evenly():
    model = ModelConfig(**MODEL)
    sizes = model_sizes(model)
    buckets = flat_buckets(sizes, plan_buckets(sizes, 300), 4)
    assert sum(b.part_size * 4 - b.padding for b in buckets) == sum(sizes.values())
    matrices = sum(size for path, size in sizes.items() if variable_rule(path).decayed)
    assert sum(bucket.decayed_in(part) for bucket in buckets for part in range(4)) == matrices
