"""Slurm's variables, as srun sets them, to addresses and ranks; what is missing is said."""

import pytest

from tfbig.errors import UserError
from trainers.cluster import Place
from trainers.slurm import expand_hosts, has_own_gpus, place_from_slurm

STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "77",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "n[2,10]",
    "SLURM_STEP_TASKS_PER_NODE": "3,2",
    "SLURM_NODEID": "1",
}


def test_ranks_follow_the_order_of_the_nodes():
    port = 10_000 + 77 * 64
    addresses = tuple(f"n2:{port + i}" for i in range(3)) + tuple(f"n10:{port + i}" for i in (0, 1))
    place = place_from_slurm(STEP)
    assert place == Place(addresses, 3)
    assert (place.local_size, place.local_rank) == (2, 0)
    last = place_from_slurm(STEP | {"SLURM_PROCID": "2", "SLURM_NODEID": "0"})
    assert (last.local_size, last.local_rank) == (3, 2)


def test_jobs_that_share_a_node_have_other_ports():
    other = place_from_slurm(STEP | {"SLURM_JOB_ID": "78"})
    assert not set(other.addresses) & set(place_from_slurm(STEP).addresses)


@pytest.mark.parametrize(
    "environment", [{}, {"SLURM_PROCID": "0"}, STEP | {"SLURM_STEP_NUM_TASKS": "1"}]
)
def test_a_world_of_one(environment):
    assert place_from_slurm(environment) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"SLURM_STEP_NUM_TASKS": ""}, "the environment lacks SLURM_STEP_NUM_TASKS"),
        (
            {"SLURM_STEP_NODELIST": "", "SLURM_STEP_TASKS_PER_NODE": ""},
            "lacks SLURM_STEP_NODELIST, SLURM_STEP_TASKS_PER_NODE",
        ),
        ({"SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS=many is no number"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "do not fit together: SLURM_PROCID=3"),
        ({"SLURM_PROCID": "5"}, "do not fit together: SLURM_PROCID=5"),
        ({"SLURM_STEP_NODELIST": "n[2-"}, r"SLURM_STEP_NODELIST=n\[2- is no node list"),
        ({"SLURM_STEP_TASKS_PER_NODE": "3x2"}, "SLURM_STEP_TASKS_PER_NODE=3x2 does not count"),
        ({"SLURM_NODEID": "0"}, "task 3 on node 0, not on node 1: start the step with srun --dis"),
    ],
)
def test_what_makes_no_sense_is_said_with_a_way_out(change, words):
    with pytest.raises(UserError, match=words) as caught:
        place_from_slurm(STEP | change)
    assert "srun" in str(caught.value)


def test_node_lists():
    assert expand_hosts("localhost") == ["localhost"]
    assert expand_hosts("a[1-2,4],b,c[099-101]-ib") == [
        *("a1", "a2", "a4", "b", "c099-ib", "c100-ib", "c101-ib")
    ]


@pytest.mark.parametrize(
    ("environment", "own"),
    [
        ({}, False),
        ({"SLURM_GPUS_PER_TASK": "1"}, True),
        ({"SLURM_TRES_PER_TASK": "cpu:4,gres/gpu:1"}, True),
        ({"SLURM_GPU_BIND": "single:1"}, True),
        ({"SLURM_GPU_BIND": "none", "SLURM_TRES_PER_TASK": "cpu:4"}, False),
    ],
)
def test_whose_the_visible_gpus_are(environment, own):
    assert has_own_gpus(environment) == own


def test_processes_of_a_host_share_its_gpus():
    from trainers.devices import own_share
    from trainers.multi_worker import sees_all_gpus

    assert own_share([], 1, 2) == []
    assert [own_share("abcde", rank, 2) for rank in (0, 1)] == ["ab", "cd"]
    assert [own_share("abcd", rank, 4) for rank in range(4)] == list("abcd")
    with pytest.raises(UserError, match="runs 3 processes but shows each only 2 GPUs"):
        own_share("ab", 0, 3)
    assert sees_all_gpus(False, {}) and not sees_all_gpus(False, {"CUDA_VISIBLE_DEVICES": "1"})
    assert sees_all_gpus(True, {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert not sees_all_gpus(True, {"SLURM_GPUS_PER_TASK": "1"})
