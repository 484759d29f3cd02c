"""SageMaker's files and variables, read and written; a whole job on a faked /opt/ml."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.launch import environment, free_ports
from tests.error_line import line_of
from tfbig import launch
from tfbig.checkpoint import latest
from tfbig.errors import UserError
from tfbig.launching.sagemaker import (
    hyperparameter,
    launcher_settings,
    publish,
    read_job,
    read_reason,
    training_flags,
    write_failure,
)


def make_root(
    root, hyperparameters=None, channels=(), hosts=("algo-1",), current="algo-1", **options
):
    """Makes what the platform puts under /opt/ml."""
    config = root / "input/config"
    config.mkdir(parents=True)
    for name in channels:
        (root / "input/data" / name).mkdir(parents=True)
    for name, value in (
        ("hyperparameters", hyperparameters or {}),
        ("inputdataconfig", {name: {"TrainingInputMode": "File"} | options for name in channels}),
        (
            "resourceconfig",
            {"current_host": current, "hosts": list(hosts), "network_interface_name": "eth0"},
        ),
    ):
        (config / f"{name}.json").write_text(json.dumps(value))
    (root / "checkpoints").mkdir()
    return root


# What version 2 of the SDK writes, and version 3.
QUOTED = {"optimizer": '"adamw"', "steps": "4", "learning_rate": "0.0001", "deterministic": "true"}
BARE = {"optimizer": "adamw", "steps": "4", "learning_rate": "0.0001", "deterministic": "true"}


@pytest.mark.parametrize("given", [QUOTED, BARE])
def test_both_quotings_give_the_same_flags(tmp_path, given):
    flags = training_flags(read_job(make_root(tmp_path / "ml", given), {}))
    assert flags == [
        f"--run_dir={tmp_path / 'ml/checkpoints/run'}",
        "--optimizer=adamw",
        "--steps=4",
        "--learning_rate=0.0001",
        "--deterministic=true",
    ]


def test_values_of_all_kinds():
    assert hyperparameter('[1, "a"]') == ["1", "a"]
    assert hyperparameter("null") == "" and hyperparameter(7) == "7"
    assert hyperparameter("007") == "007" and hyperparameter('"') == '"'
    assert hyperparameter('"true"') == "true" and hyperparameter("1e-4") == "1e-4"


def test_the_toolkits_and_the_launchers_own_are_no_flags(tmp_path):
    given = {
        "sagemaker_program": '"train.py"',
        "sagemaker_mpi_num_of_processes_per_host": "8",
        "restarts": "2",
        "global-batch": "64",
    }
    job = read_job(make_root(tmp_path / "ml", given), {})
    assert launcher_settings(job) == {"restarts": "2", "processes_per_host": "8"}
    assert training_flags(job)[1:] == ["--global_batch=64"]


def test_files_where_there_are_no_variables_and_variables_where_there_are(tmp_path):
    root = make_root(tmp_path / "ml", {"steps": "3"}, hosts=["algo-2", "algo-1"], current="algo-2")
    job = read_job(root, {})
    assert (job.hosts, job.index, job.network_interface) == (("algo-1", "algo-2"), 1, "eth0")
    variables = {
        "SM_HOSTS": '["a", "b", "c"]',
        "SM_CURRENT_HOST": "c",
        "SM_NETWORK_INTERFACE_NAME": "ib0",
        "SM_HPS": '{"steps": 9}',
        "SM_CHANNELS": '["data"]',
        "SM_CHANNEL_DATA": "/elsewhere",
        "TRAINING_JOB_NAME": "job",
    }
    job = read_job(root, variables)
    assert (job.index, job.network_interface, job.job_name) == (2, "ib0", "job")
    assert job.hyperparameters == {"steps": "9"} and job.channels["data"] == Path("/elsewhere")
    (tmp_path / "by_hand").mkdir()
    assert read_job(tmp_path / "by_hand", {}).index == 0


def test_channels(tmp_path):
    channels = ["train", "init_from", "run", "code"]
    root = make_root(tmp_path / "ml", {}, channels)
    data = root / "input/data"
    (data / "train/manifest.json").touch()
    assert training_flags(read_job(root, {"TRAINING_JOB_NAME": "j"})) == [
        f"--run_dir={data / 'run/j'}",
        f"--init_from={data / 'init_from'}",
        f"--data={data / 'train'}",
    ]
    (data / "train/manifest.json").unlink()
    flags = training_flags(read_job(root, {}))
    assert f"--source={data / 'train'}" in flags and flags[-1].startswith("--data=")


@pytest.mark.parametrize(
    ("hosts", "options", "words"),
    [
        (["algo-1"], {"TrainingInputMode": "Pipe"}, "is a pipe: use the input mode File"),
        (["algo-1", "algo-2"], {"S3DistributionType": "ShardedByS3Key"}, "use S3DistributionType"),
        (["algo-1", "algo-2"], {}, "holds no prepared data, and 2 hosts need the same"),
    ],
)
def test_channels_that_cannot_be_trained_from(tmp_path, hosts, options, words):
    root = make_root(tmp_path / "ml", {}, ["data"], hosts, **options)
    with pytest.raises(UserError, match=words):
        training_flags(read_job(root, {}))


def test_damaged_files(tmp_path):
    root = make_root(tmp_path / "ml", hosts=["algo-1"], current="algo-9")
    with pytest.raises(UserError, match="this host is algo-9, which is none of algo-1"):
        read_job(root, {})
    (root / "input/config/hyperparameters.json").write_text("{")
    with pytest.raises(UserError, match=r"hyperparameters.json cannot be read"):
        read_job(root, {"SM_CURRENT_HOST": "algo-1"})
    with pytest.raises(UserError, match="SM_HOSTS=x is no JSON"):
        read_job(root, {"SM_HOSTS": "x"})


def test_without_the_root_nothing_is_made(tmp_path, capsys):
    flag = f"--sagemaker_root={tmp_path / 'none'}"
    assert "there is no" in line_of(launch.main, ["--cluster=sagemaker", flag], capsys, "launch")
    assert not (tmp_path / "none").exists()


def test_a_reason_is_short_and_the_first_one_stays(tmp_path):
    write_failure(tmp_path, "x" * 3000)
    path = tmp_path / "output/failure"
    assert path.read_text() == "x" * 1024
    write_failure(tmp_path, "later")
    assert path.read_text() == "x" * 1024
    publish(tmp_path, str(tmp_path / "no run"))
    assert not (tmp_path / "model").exists()


def test_a_launchers_reason_is_read_as_far_as_it_can_be(tmp_path):
    assert read_reason(tmp_path / "none") == read_reason(tmp_path) == ""
    (tmp_path / "reason").write_bytes(b"caf\xc3\xa9 \xff")
    assert read_reason(tmp_path / "reason") == "café \ufffd"


def start(root, *flags, extra=None):
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "tfbig.launch", "--cluster=sagemaker", "--restarts=0"]
    return subprocess.Popen(
        [*command, f"--sagemaker_root={root}", f"--port={port}", *flags],
        env=environment(extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(condition, process, seconds=240):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.2)


@pytest.mark.distributed
def test_a_job_stops_goes_on_and_leaves_a_model(tmp_path, small_flags):
    given = dict(flag[2:].split("=", 1) for flag in small_flags)
    data = given.pop("data")
    given |= {"steps": "100000", "checkpoint_every": "5", "eval_every": "0", "tensorboard": "false"}
    given |= {"processes_per_host": "2"}
    root = make_root(tmp_path / "ml", {k: json.dumps(v) for k, v in given.items()})
    (root / "input/data").mkdir()
    (root / "input/data/training").symlink_to(data)
    checkpoints = root / "checkpoints/run/checkpoints"
    process = start(root)
    try:
        wait_for(lambda: latest(checkpoints), process)
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=120)[0]
    finally:
        process.kill()
    assert process.returncode == 143, output
    saved = latest(checkpoints).step
    assert (root / "model/config.json").is_file() and latest(root / "model/checkpoints")
    assert not (root / "output/failure").exists()
    given["steps"] = str(saved + 3)
    file = root / "input/config/hyperparameters.json"
    file.write_text(json.dumps(given))  # version 3's way
    process = start(root)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    assert "going on from its checkpoint" in output and latest(checkpoints).step == saved + 3
    assert latest(root / "model/checkpoints").step == saved + 3
    assert (root / "output/data/metrics.jsonl").stat().st_size > 0
    assert not os.path.exists(root / "output/.tfbig-reason")


@pytest.mark.distributed
def test_a_failed_job_says_why(tmp_path):
    root = make_root(tmp_path / "ml", {"lerning_rate": "0.1", "processes_per_host": "1"})
    process = start(root)
    output = process.communicate(timeout=200)[0]
    assert process.returncode == 2, output
    reason = (root / "output/failure").read_text()
    assert reason.startswith("algo-1: rank 0 ended with code 2: tfbig train: error: unknown flag")
    assert "Did you mean learning_rate" in reason


@pytest.mark.distributed
def test_a_model_that_cannot_be_put_in_its_place_is_a_failure(tmp_path, small_flags):
    given = dict(flag[2:].split("=", 1) for flag in small_flags)
    data = given.pop("data")
    given |= {"steps": "1", "eval_every": "0", "tensorboard": "false", "processes_per_host": "1"}
    root = make_root(tmp_path / "ml", given)
    (root / "input/data").mkdir()
    (root / "input/data/training").symlink_to(data)
    (root / "model").symlink_to("/dev/full")
    process = start(root)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 1, output
    assert latest(root / "checkpoints/run/checkpoints").step == 1
    reason = (root / "output/failure").read_text()
    assert reason.startswith("tfbig launch: [Errno ") and str(root / "model") in reason, reason
