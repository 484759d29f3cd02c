"""Where launchers and ranks stand, from what Slurm, mpirun and lists of hosts say."""

import json
import socket

import pytest

from tfbig.errors import UserError
from tfbig.launching.launch_config import LaunchConfig
from tfbig.launching.place import (
    Place,
    environment_of,
    num_gpus,
    place_by_hosts,
    place_by_mpi,
    place_by_slurm,
    slots_of,
    tf_config,
)

DEFAULT = LaunchConfig()
STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "3",
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "n[2,10]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_NODEID": "1",
}


def test_a_task_of_slurms_is_a_launcher_of_one_rank():
    hosts = ("n2", "n2", "n10")
    assert place_by_slurm(DEFAULT, STEP) == Place(2, 3, "n2", 10_000 + 3 * 64, 1, hosts)
    assert place_by_slurm(LaunchConfig(port=99, processes_per_host=4), STEP)[3:5] == (99, 4)
    alone = place_by_slurm(DEFAULT, STEP | {"SLURM_STEP_NUM_TASKS": "1"})
    assert alone[:3] == (0, 1, "localhost")
    with pytest.raises(UserError, match="outside a step of Slurm's: start it as `srun"):
        place_by_slurm(DEFAULT, {})


def test_mpirun_gives_rank_and_size_and_hosts_the_first_host():
    environ = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    here = environ | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert place_by_mpi([], DEFAULT, here)[:3] == (1, 2, "localhost")
    assert place_by_mpi(["a", "b"], DEFAULT, environ)[:3] == (1, 2, "a")
    with pytest.raises(UserError, match="pass its host as --hosts"):
        place_by_mpi([], DEFAULT, environ)
    with pytest.raises(UserError, match="outside mpirun"):
        place_by_mpi([], DEFAULT, {})


def test_a_host_finds_itself_by_name_and_address():
    name = socket.gethostname()
    assert place_by_hosts(["elsewhere", name], -1, DEFAULT, {}).number == 1
    assert place_by_hosts(["192.0.2.77", "127.0.0.1"], -1, DEFAULT, {}).number == 1
    assert place_by_hosts(["a", "b"], 1, DEFAULT, {})[:3] == (1, 2, "a")
    for hosts, index, words in (
        (["192.0.2.77"], -1, "is not clearly one of 192.0.2.77: pass --host_index"),
        (["a", "a"], 0, "names a host twice"),
        (["a"], 1, "there are 1 hosts"),
    ):
        with pytest.raises(UserError, match=words):
            place_by_hosts(hosts, index, DEFAULT, {})


def test_one_rank_a_gpu(tmp_path):
    assert num_gpus({}, tmp_path) == 0
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert num_gpus({}, tmp_path) == 2
    assert num_gpus({"CUDA_VISIBLE_DEVICES": "3"}, tmp_path) == 1
    assert num_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert place_by_hosts(["a"], 0, DEFAULT, {"CUDA_VISIBLE_DEVICES": "0,1,2"}).num_processes == 3


def test_ranks_of_uneven_hosts():
    slots = slots_of(["a", "a", "b"], [1, 2, 2])
    assert [(s.host, s.rank, s.local_rank, s.local_size) for s in slots] == [
        ("a", 0, 0, 3),
        ("a", 1, 1, 3),
        ("a", 2, 2, 3),
        ("b", 3, 0, 2),
        ("b", 4, 1, 2),
    ]
    assert [(s.cross_rank, s.cross_size) for s in slots] == [(0, 2), (0, 2), (0, 1), (1, 2), (1, 2)]
    with pytest.raises(UserError, match="ranks of a host are not neighbours"):
        slots_of(["a", "b", "a"], [1, 1, 1])


def test_the_ranks_environment(monkeypatch):
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    slots = slots_of(["a", "b"], [1, 1])
    values = environment_of(slots[1], "10.0.0.1", 7777, "ib0")
    assert (values["HOROVOD_RANK"], values["HOROVOD_SIZE"]) == ("1", "2")
    assert (values["HOROVOD_GLOO_IFACE"], values["NCCL_SOCKET_IFNAME"]) == ("ib0", "=ib0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^docker0")
    assert environment_of(slots[1], "10.0.0.1", 7777, "ib0")["NCCL_SOCKET_IFNAME"] == "^docker0"
    workers = ["10.0.0.1:7778", "10.0.0.2:7778"]
    addresses = {"a": "10.0.0.1", "b": "10.0.0.2"}
    assert json.loads(tf_config(slots, 1, addresses, 7777)) == {
        "cluster": {"worker": workers},
        "task": {"type": "worker", "index": 1},
    }
