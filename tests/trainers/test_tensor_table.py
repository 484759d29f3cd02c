"""The shards of all ranks tile each variable exactly once, on any mesh."""

import itertools

import numpy as np
import pytest

from tfbig.config import ModelConfig
from tfbig.variables import variable_specs
from trainers.mesh import Mesh
from trainers.tensor_table import TOKEN_TABLE, shard_table, stage_paths

MODELS = {
    "tied": ModelConfig(vocab_size=201, embed_dim=16, num_layers=4, num_heads=4, max_length=8),
    "untied": ModelConfig(
        vocab_size=61,
        embed_dim=16,
        num_layers=4,
        num_heads=4,
        max_length=8,
        tied_head=False,
        head_bias=True,
    ),
}
RANGES = {1: [(0, 4)], 2: [(0, 1), (1, 4)], 4: [(0, 1), (1, 2), (2, 3), (3, 4)]}
MESHES = list(itertools.product((1, 2), (1, 2, 4), (1, 2, 4)))


def tables(model: ModelConfig, data: int, pipeline: int, tensor: int) -> list[dict]:
    mesh = Mesh({"data": data, "pipeline": pipeline, "tensor": tensor})
    result = []
    for rank in range(mesh.size):
        places = mesh.coordinates(rank)
        place = places["pipeline"]
        specs = stage_paths(model, RANGES[pipeline][place], place == 0, place == pipeline - 1)
        paths = [spec.path for spec in specs]
        result.append(shard_table(model, paths, places, mesh.sizes))
    return result


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "d{}p{}t{}".format(*mesh))
def test_counted_shards_tile_every_variable_once(model, mesh):
    times = {spec.path: np.zeros(spec.shape, int) for spec in variable_specs(model)}
    for table in tables(model, *mesh):
        for shard in table.values():
            part = tuple(
                slice(first, first + length)
                for first, length in zip(shard.start, shard.valid_shape, strict=True)
            )
            assert times[shard.path][part].shape == shard.valid_shape
            times[shard.path][part] += shard.is_counted
    assert all(np.all(count == 1) for count in times.values())


def test_a_tied_table_is_on_both_ends_and_counted_on_the_first():
    first, last = tables(MODELS["tied"], 1, 2, 1)
    assert first[TOKEN_TABLE].is_counted and not first[TOKEN_TABLE].is_copy
    assert last[TOKEN_TABLE].is_copy and not last[TOKEN_TABLE].is_counted
    assert "embedding_layer/pos_emb/embeddings" not in last
    assert TOKEN_TABLE not in tables(MODELS["untied"], 1, 2, 1)[1]


def test_padding_is_in_the_local_shape_alone():
    assert tables(MODELS["tied"], 1, 1, 4)[3][TOKEN_TABLE].valid_shape == (0, 16)
    shard = tables(MODELS["tied"], 1, 1, 2)[1][TOKEN_TABLE]
    assert shard.local_shape == (128, 16)
    assert shard.valid_shape == (73, 16) and shard.start == (128, 0)
    assert shard.global_shape == (201, 16)
