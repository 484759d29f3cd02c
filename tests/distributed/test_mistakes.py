"""A user's mistake under several ranks: one error line in all, from rank 0, and exit code 2."""

import json
import os

import pytest

from tests.distributed.launch import horovodrun, start_ranks, tf_configs
from tfbig.run_folder import read_metrics

WORKER = "tests/distributed/mistakes_worker.py"
TIMEOUT = 420.0


def flags_of(folder, mistakes: dict, small_flags: list[str], *more: str) -> list[str]:
    run = f"--run_dir={folder / 'run'}"
    return [WORKER, json.dumps(mistakes), *small_flags, run, "--steps=1", "--eval_every=0", *more]


def error_lines(output: str) -> list[str]:
    assert "Traceback" not in output, output
    return [line for line in output.splitlines() if "error: " in line]


def run_cluster(folder, mistakes, small_flags) -> tuple[list[int], list[list[str]], str]:
    """Returns the exit codes and error lines by rank, and all that was printed."""
    arguments = flags_of(folder, mistakes, small_flags, "--strategy=multi_worker")
    ended = start_ranks([arguments] * 2, tf_configs(2), TIMEOUT, patience=90.0)
    everything = "\n---\n".join(process.stdout for process in ended)
    codes = [process.returncode for process in ended]
    return codes, [error_lines(process.stdout) for process in ended], everything


@pytest.mark.distributed
def test_a_mistake_of_all_ranks_is_said_once_under_horovodrun(tmp_path, small_flags):
    arguments = flags_of(tmp_path, {}, small_flags, "--strategy=horovod", "--num_heads=3")
    done = horovodrun(2, arguments, TIMEOUT)
    lines = error_lines(done.stdout)
    assert len(lines) == 1 and lines[0].startswith("[0]<stderr>:tfbig train: error: --num_heads=3")
    assert "Exit code: 2" in done.stdout or "exit code: 2" in done.stdout.lower(), done.stdout


@pytest.mark.distributed
def test_a_mistake_of_one_rank_is_said_by_rank_0_under_horovodrun(tmp_path, small_flags):
    mistakes = {"1": [f"--init_from={tmp_path / 'nowhere'}"]}
    done = horovodrun(2, flags_of(tmp_path, mistakes, small_flags, "--strategy=horovod"), TIMEOUT)
    lines = error_lines(done.stdout)
    assert len(lines) == 1, done.stdout
    # Flags that differ are found first, on every rank.
    assert "the ranks differ in --init_from" in lines[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.distributed
def test_a_mistake_of_all_ranks_is_said_once_in_a_cluster(tmp_path, small_flags):
    codes, lines, everything = run_cluster(tmp_path, {}, [*small_flags, "--num_heads=3"])
    assert codes == [2, 2] and [len(own) for own in lines] == [1, 0], everything
    assert lines[0][0].startswith("tfbig train: error: --num_heads=3 does not divide")
    assert "rank 1 ends; rank 0, of the same flags, says why" in everything


@pytest.mark.distributed
def test_a_mistake_of_one_rank_is_said_by_rank_0_in_a_cluster(tmp_path, small_flags):
    missing = tmp_path / "nowhere"
    codes, lines, everything = run_cluster(tmp_path, {"1": [f"--data={missing}"]}, small_flags)
    assert codes == [2, 2] and [len(own) for own in lines] == [1, 0], everything
    # Flags that differ are found first, on every rank.
    assert "the ranks differ in --data: start all of them with the same flags" in lines[0][0]
    assert not (tmp_path / "run").exists()


@pytest.mark.distributed
def test_no_room_on_one_rank_ends_all_at_the_same_save(tmp_path, small_flags):
    codes, lines, everything = run_cluster(tmp_path, {"1": ["no room"]}, small_flags)
    assert codes == [2, 2] and [len(own) for own in lines] == [1, 0], everything
    assert "error: rank 1: no room for a checkpoint" in lines[0][0]


def slurm_step(tasks: int, folder) -> list[dict[str, str]]:
    """Returns the variables that srun would set for each task of a step on this machine."""
    job = sum(str(folder).encode()) + os.getpid()  # its ports
    common = {
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": str(job),
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": str(tasks),
        "TF_CONFIG": "",
        "CUDA_VISIBLE_DEVICES": "",  # of a machine without GPUs: all would share one's
    }
    return [common | {"SLURM_PROCID": str(task)} for task in range(tasks)]


@pytest.mark.distributed
def test_slurm_starts_a_cluster_on_machines_without_gpus(tmp_path, small_flags):
    arguments = flags_of(tmp_path, {}, small_flags, "--strategy=multi_worker")
    ended = start_ranks([arguments] * 2, slurm_step(2, tmp_path), TIMEOUT)
    everything = "\n---\n".join(process.stdout for process in ended)
    assert [process.returncode for process in ended] == [0, 0], everything
    assert "multi_worker: 2 processes, 2 replicas" in ended[0].stdout
    assert len(read_metrics(tmp_path / "run")) == 1


@pytest.mark.distributed
def test_two_workers_on_one_gpu_are_named(tmp_path, small_flags):
    mistakes = {"0": ["GPU 7"], "1": ["GPU 7"]}
    codes, lines, everything = run_cluster(tmp_path, mistakes, small_flags)
    assert codes == [2, 2] and [len(own) for own in lines] == [1, 0], everything
    assert "error: ranks 0 and 1 drive the same GPU, on which NCCL would hang" in lines[0][0]
    assert not (tmp_path / "run").exists()


# What each launcher sets; mpirun ends rank 1 when rank 0 has said why, srun does not.
SRUN = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "{rank}", "TF_CONFIG": ""}
MPIRUN = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "{rank}", "TF_CONFIG": ""}


@pytest.mark.distributed
@pytest.mark.parametrize(("strategy", "launcher"), [("single", SRUN), ("multi_worker", MPIRUN)])
def test_ranks_that_know_nothing_of_each_other_are_refused(
    strategy, launcher, tmp_path, small_flags
):
    arguments = flags_of(tmp_path, {}, small_flags, f"--strategy={strategy}")
    environments = [{k: v.format(rank=rank) for k, v in launcher.items()} for rank in range(2)]
    ended = start_ranks([arguments] * 2, environments, TIMEOUT, patience=90.0)
    everything = "\n---\n".join(process.stdout for process in ended)
    assert [process.returncode for process in ended] == [2, 2], everything
    (line,) = ended[0].stdout.splitlines()
    assert f"{next(iter(launcher))}=2, but this rank finds itself in a world of 1: " in line
    assert f": --strategy={strategy} " in line and not (tmp_path / "run").exists()
    if launcher is SRUN:
        assert ended[1].stdout.count("\n") == 1
        assert "rank 1 ends; rank 0, of the same flags, says why" in ended[1].stdout
