"""Where ranks stand: which of them cross nodes, share memory and cores, and write checkpoints."""

import dataclasses
import json
import os
from pathlib import Path

import pytest

from tests.planner.test_measure import machine
from tfbig import presets
from tfbig.config import replace_fields
from tfbig.planner import changes, network, search
from tfbig.planner.changes import cheapest_changes, shortfall
from tfbig.planner.cluster import load_constants, make_cluster
from tfbig.planner.economics import fullest_share
from tfbig.planner.layout import make_plan
from tfbig.planner.measure import constants_of, fit_overhead
from tfbig.planner.network import ends_of_pipelines, line_of, neighbours, stride_of
from tfbig.planner.question import constants_path, own_constants, request_of
from trainers.mesh import Mesh

A100 = make_cluster("a100-80:24", load_constants())
LINK = A100.device.link_bandwidth * A100.link_fraction
NETWORK = A100.network_bandwidth * A100.network_fraction


def mesh(data: int, pipeline: int, tensor: int, order: str = "DPT") -> Mesh:
    return Mesh({"data": data, "pipeline": pipeline, "tensor": tensor}, order)


def test_the_slowest_group_counts_where_not_all_stay_within_a_node():
    """Of groups of 6 on nodes of 8, ranks 0-5 share a node and 6-11 do not."""
    line = line_of(A100, mesh(4, 1, 6), "tensor")
    assert line.nodes == 2
    # Ranks 8-11 and 12-15, of two groups, share their node's cards.
    assert line.bandwidth == pytest.approx(min(LINK, NETWORK / 2))
    within = line_of(A100, mesh(3, 1, 8), "tensor")
    assert (within.nodes, within.bandwidth) == (1, LINK)


def test_lines_of_an_axis_share_a_nodes_cards():
    across = line_of(A100, mesh(3, 1, 8), "data")
    assert (across.size, across.nodes) == (3, 3)
    assert across.bandwidth == pytest.approx(NETWORK / 8)
    # One ring of all ranks has the cards for itself, a node that is not full or not.
    half = dataclasses.replace(A100, num_devices=12)
    assert line_of(half, mesh(12, 1, 1), "data").bandwidth == pytest.approx(min(LINK, NETWORK))


@pytest.mark.parametrize("axis", ["data", "pipeline", "tensor"])
@pytest.mark.parametrize("order", ["DPT", "TPD", "PDT"])
@pytest.mark.parametrize("sizes", [(8, 2, 4), (4, 1, 16), (2, 16, 2), (1, 32, 1), (64, 1, 1)])
def test_regular_places_need_no_counting(sizes, order, axis):
    """Shapes of lines by arithmetic are those that counting each rank finds."""
    places, per_node = mesh(*sizes, order), 8
    cluster = make_cluster(f"a100-80:{places.size}", load_constants())
    shapes = network._counted(places.size, places.sizes[axis], stride_of(places, axis), per_node)
    [(on_node, sharing)] = shapes
    assert line_of(cluster, places, axis) == network._line(cluster, on_node, sharing)


@pytest.mark.parametrize("axis", ["data", "pipeline", "tensor"])
@pytest.mark.parametrize("order", ["DPT", "TPD", "PDT"])
@pytest.mark.parametrize("sizes", [(640, 3, 1), (80, 3, 8), (32, 15, 4), (5, 12, 2), (4, 3, 2)])
def test_places_that_repeat_themselves_are_counted_once(sizes, order, axis):
    places, per_node = mesh(*sizes, order), 8
    cluster = make_cluster(f"a100-80:{places.size}", load_constants())
    size, stride = places.sizes[axis], stride_of(places, axis)
    lines = [
        network._line(cluster, on_node, sharing)
        for on_node, sharing in network._counted(places.size, size, stride, per_node)
    ]
    slowest = min(lines, key=lambda line: (line.bandwidth, -line.latency))
    assert line_of(cluster, places, axis) == slowest
    if size == 1:
        return  # nobody is next
    facing = [
        sum(
            rank // stride % size + 1 < size and (rank + stride) // per_node != node
            for rank in range(node * per_node, min(places.size, (node + 1) * per_node))
        )
        for node in range(cluster.num_nodes)
    ]
    assert network._facing(places.size, size, stride, per_node) == max(facing)


def test_pipelines_that_cross_nodes_elsewhere_than_rank_0s():
    """Ranks 0, 2, 4 are one node's; of the next pipeline 6 is on it, and 8 is not."""
    places = mesh(4, 3, 2)
    pair, ends = neighbours(A100, places), ends_of_pipelines(A100, places)
    assert pair.nodes == ends.nodes == 2
    assert pair.bandwidth == pytest.approx(min(LINK, NETWORK / 2))  # ranks 6 and 7
    assert neighbours(A100, mesh(12, 2, 1)).nodes == 1


def test_what_was_measured_of_a_device_holds_in_its_instances(tmp_path):
    own = {
        "devices": {
            "a100-40": {
                "overhead": {"context_bytes": 9e9},
                "network": {"link_fraction": 0.5, "network_fraction": 0.25},
            }
        },
        "instances": {"p4d.24xlarge": {"network": {"network_fraction": 0.125}}},
    }
    path = tmp_path / "own.json"
    path.write_text(json.dumps(own))
    cluster = make_cluster("p4d.24xlarge:2", load_constants(str(path)))
    assert cluster.overhead["context_bytes"] == 9e9
    assert cluster.link_fraction == 0.5
    assert cluster.network_fraction == 0.125  # the instance's own, where it has one
    assert make_cluster("a100-40:16", load_constants(str(path))).network_fraction == 0.25


def write_here() -> None:
    saw, link = machine(0.5, 0.5, 2e-5), {"bandwidth": 2e9, "latency": 1e-4}
    constants = constants_of({1: saw}, fit_overhead(saw["steps"]), link, 8e9)
    Path(constants_path()).write_text(json.dumps(constants))


def test_processes_beyond_the_cores_take_turns(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    write_here()
    two, four = (make_cluster(f"here:{n}", own_constants()).device for n in (2, 4))
    assert four.peak["float32"] == pytest.approx(two.peak["float32"] / 2)
    assert four.memory_bandwidth == pytest.approx(two.memory_bandwidth / 2)
    assert four.kernel_seconds == pytest.approx(2 * two.kernel_seconds)
    # Over two hosts each has its core, and half of a host's memory.
    apart = make_cluster("here:4", own_constants(), devices_per_node=2)
    assert apart.num_nodes == 2
    assert apart.device == two


GPT2 = {"preset": "gpt2_124m", "global_batch": 64, "strategy": "horovod"}


def test_zeros_ranks_all_write_their_shards():
    def share(name: str = "h100-80:64", **fields: object) -> float:
        config = replace_fields(presets.preset("gpt2_124m"), {"strategy": "horovod"} | fields)
        return fullest_share(config, make_cluster(name, load_constants()))

    assert share() == 1
    # Two of three float32 numbers are slots, on eight nodes; weights are rank 0's.
    assert share(shard_optimizer_state=True) == pytest.approx(1 / 3 + 2 / 3 / 8)
    assert share(shard_optimizer_state=True, precision="bfloat16") == pytest.approx(1 / 8)
    assert share(shard_parameters=True) == pytest.approx(1 / 8)
    wide = {"strategy": "pipeline", "pipeline_parallel_degree": 2, "tensor_parallel_degree": 4}
    assert share(**wide) == 1
    assert share(**wide, placement_strategy="spread") == pytest.approx(1 / 8)


def test_a_checkpoint_takes_as_long_as_the_busiest_node():
    whole, sharded = (
        make_plan(request_of(GPT2 | {"cluster": "h100-80:64", "shard_parameters": is_sharded}))
        for is_sharded in (False, True)
    )
    assert sharded.economics.checkpoint_seconds == pytest.approx(
        whole.economics.checkpoint_seconds / 8
    )


def test_what_is_offloaded_must_fit_the_hosts():
    request = request_of(
        GPT2
        | {"cluster": "a100-80:16", "shard_optimizer_state": True, "offload_optimizer_state": True}
    )
    plan = make_plan(request)
    assert plan.fits
    assert plan.host_bytes == pytest.approx(8 * plan.memory[0].host, rel=1e-6)
    small = dataclasses.replace(request.cluster, host_memory_bytes=plan.host_bytes / 2)
    tight = make_plan(dataclasses.replace(request, cluster=small))
    assert not tight.fits
    assert "into one node's memory" in shortfall(tight) and "GB short" in shortfall(tight)


def test_where_tensors_lie_in_host_memory_offloading_saves_nothing():
    write_here()
    shape = {"cluster": "here:2", "shard_optimizer_state": True, "global_batch": 8}
    kept, moved = (
        make_plan(request_of(shape | {"offload_optimizer_state": is_moved}))
        for is_moved in (False, True)
    )
    assert moved.peak_bytes == kept.peak_bytes
    assert moved.host_bytes == 0 and moved.memory[0].host == 0


def test_the_closed_formula_counts_the_models_own_widths():
    """Where gradients' way takes most of a step, 12 D^2 a block would miss it by half."""
    values = {"preset": "gpt2_124m", "cluster": "a100-80:16", "global_batch": 16}
    request = request_of(values | {"feed_forward_dim": 16 * 768, "network_gbps": 10})
    [candidate] = [
        c
        for c in search.Search(request)
        if c.request.config.parallel.strategy == "horovod"
        and c.request.config.parallel.sharding_level == 0
        and c.request.config.parallel.activation_checkpointing == "none"
    ]
    plan = make_plan(candidate.request)
    assert plan.step.data_exposed > 0.8 * plan.step.total
    assert candidate.seconds == pytest.approx(plan.step.total, rel=0.1)


def test_best_looks_at_batches_of_any_size_and_at_sharding_beside_adapters():
    values = {"preset": "gpt2_124m", "cluster": "a100-80:8", "global_batch": 24}
    sizes = {layout.microbatch_size for layout in search.layouts(request_of(values))}
    assert 3 in sizes
    request = request_of(values | {"lora_rank": 4})
    levels = {c.request.config.parallel.sharding_level for c in search.Search(request)}
    assert levels > {0}


def test_the_fastest_changes_are_among_those_that_are_planned(monkeypatch):
    """Of many that fit, few are planned in full: those that look fast, not those listed first."""
    values = {"preset": "gpt3_6_7b", "cluster": "a100-40:64", "global_batch": 512}
    request = request_of(values | {"strategy": "horovod"})
    tight = 0.4 * make_plan(request).peak_bytes
    device = dataclasses.replace(request.cluster.device, memory_bytes=tight)
    cluster = dataclasses.replace(request.cluster, device=device)
    request = dataclasses.replace(request, cluster=cluster)
    seconds = []
    for tried in (10**6, 4):
        monkeypatch.setattr(changes, "_TRIED", tried)
        seconds.append(cheapest_changes(request)[0].plan.step.total)
    assert seconds[0] == seconds[1]
