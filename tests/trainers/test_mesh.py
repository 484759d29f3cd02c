"""Where ranks stand on the mesh, and in which groups."""

import itertools

import pytest

from tfbig.errors import UserError
from trainers.mesh import (
    AXES,
    Mesh,
    make_mesh,
    mesh_groups,
    placement_order,
    warn_of_slow_tensor_groups,
)

ORDERS = ["".join(order) for order in itertools.permutations("DPT")]
SIZES = [(1, 1, 1), (2, 2, 2), (1, 4, 2), (3, 2, 1), (2, 1, 4)]


def mesh_of(sizes: tuple[int, int, int], order: str = "DPT") -> Mesh:
    return Mesh(dict(zip(("data", "pipeline", "tensor"), sizes, strict=True)), order)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sizes", SIZES)
def test_places_and_ranks_are_inverse(sizes, order):
    mesh = mesh_of(sizes, order)
    places = [mesh.coordinates(rank) for rank in range(mesh.size)]
    assert len({tuple(sorted(place.items())) for place in places}) == mesh.size
    assert [mesh.rank_at(**place) for place in places] == list(range(mesh.size))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sizes", SIZES)
def test_rightmost_axis_joins_neighbours(sizes, order):
    mesh = mesh_of(sizes, order)
    axis = AXES[order[-1]]
    for line in mesh.lines(axis):
        assert line == tuple(range(line[0], line[0] + mesh.sizes[axis]))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("axis", AXES.values())
def test_lines_of_an_axis_are_a_partition_of_the_ranks(sizes, order, axis):
    mesh = mesh_of(sizes, order)
    lines = mesh.lines(axis)
    assert sorted(rank for line in lines for rank in line) == list(range(mesh.size))
    assert {len(line) for line in lines} == {mesh.sizes[axis]}
    assert all(list(line) == sorted(line) for line in lines)  # a set's order is the place's


def test_cluster_and_spread_as_the_original_documents_them():
    # 8 GPUs, 2 partitions: cluster's MP groups are [0,1], [2,3] ...; spread's [0,4], [1,5] ...
    cluster = make_mesh(8, 2, 1, "cluster")
    assert cluster.lines("pipeline") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    spread = make_mesh(8, 2, 1, "spread")
    assert spread.lines("pipeline") == [(0, 4), (1, 5), (2, 6), (3, 7)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sizes", SIZES)
def test_sizes_multiply_as_the_original_defines_them(sizes, order):
    mesh = mesh_of(sizes, order)
    seen = set()
    for rank in range(mesh.size):
        known = mesh.ranks_and_sizes(rank)
        assert known["pp_size"] * known["dp_size"] == mesh.size
        assert known["mp_size"] * known["rdp_size"] == mesh.size
        assert known["pp_size"] * known["tp_size"] * known["rdp_size"] == mesh.size
        for kind in ("mp", "pp", "tp", "dp", "rdp"):
            assert 0 <= known[f"{kind}_rank"] < known[f"{kind}_size"]
        seen.add((known["mp_rank"], known["rdp_rank"]))
        assert (known["mp_size"] * known["dp_size"] == mesh.size) is (known["tp_size"] == 1)
    assert len(seen) == mesh.size


def test_model_ranks_share_a_data_rank():
    mesh = make_mesh(8, 2, 2, "DPT")
    assert mesh.model_ranks(5) == (4, 5, 6, 7)


@pytest.mark.parametrize(("placement", "order"), [("cluster", "DPT"), ("tpd", "TPD")])
def test_placement_names(placement, order):
    assert placement_order(placement) == order


@pytest.mark.parametrize("placement", ["DP", "DPP", "near", ""])
def test_unknown_placement_names_the_known_ones(placement):
    with pytest.raises(UserError, match=r"cluster \(DPT\), spread \(TPD\)"):
        placement_order(placement)


@pytest.mark.parametrize(
    ("ranks", "pipeline", "tensor", "message"),
    [
        (6, 2, 2, r"6 ranks are no multiple of .* 2 x 2 = 4: start 4 ranks"),
        (1, 2, 1, r"1 ranks are no multiple of .* 2 x 1 = 2: start 2 ranks"),
        (4, 0, 1, "--pipeline_parallel_degree=0 must be at least 1"),
    ],
)
def test_degrees_that_do_not_divide(ranks, pipeline, tensor, message):
    with pytest.raises(UserError, match=message):
        make_mesh(ranks, pipeline, tensor, "cluster")


@pytest.mark.parametrize(("ranks_per_host", "hosts"), [(8, 1), (4, 1), (2, 2), (1, 4)])
def test_tensor_groups_that_cross_hosts(ranks_per_host, hosts):
    assert make_mesh(8, 2, 4, "DPT").hosts_of_a_tensor_group(ranks_per_host) == hosts


def test_tensor_groups_that_cross_hosts_are_warned_of_once(capsys):
    warn_of_slow_tensor_groups(make_mesh(8, 2, 4, "DPT"), ranks_per_host=4)
    assert not capsys.readouterr().err
    warn_of_slow_tensor_groups(make_mesh(8, 2, 4, "DPT"), ranks_per_host=2)
    warning = capsys.readouterr().err
    assert (
        warning.startswith("warning: each tensor group spans 2 hosts") and "\n" not in warning[:-1]
    )
    assert "times slower" in warning and "--tensor_parallel_degree <= 2" in warning


def test_groups_are_few():
    """Two ranks a pipeline hand-over, and one group a line of each other axis."""
    groups = mesh_groups(make_mesh(8, 4, 1, "cluster"), is_ring=False, is_tied=True)
    pipeline = [ranks for axis, ranks in groups if axis == "pipeline"]
    assert pipeline == [(0, 1), (1, 2), (2, 3), (4, 5), (5, 6), (6, 7)]
    assert [ranks for axis, ranks in groups if axis == "tied"] == [(0, 3), (4, 7)]
    assert [ranks for axis, ranks in groups if axis == "data"] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    ring = mesh_groups(make_mesh(8, 4, 1, "cluster"), is_ring=True, is_tied=True)
    assert set(ring) - set(groups) == {("pipeline", (0, 3)), ("pipeline", (4, 7))}
    # Of two stages, the tied ends, the ring's closure and the pair are the same two ranks.
    two = mesh_groups(make_mesh(4, 2, 1, "cluster"), is_ring=True, is_tied=True)
    assert {ranks for axis, ranks in two if axis in ("pipeline", "tied")} == {(0, 1), (2, 3)}
