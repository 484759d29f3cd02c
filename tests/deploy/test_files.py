"""The files under deploy/: parsed, held against their schemas, and started where they can be."""

import copy
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.deploy.shapes import MPIJOB, TRAINING_JOB, misfits
from tests.distributed.launch import REPOSITORY, run
from tfbig.launching.sagemaker import hyperparameter
from tfbig.train import config_from

DEPLOY = REPOSITORY / "deploy"
SCRIPTS = sorted([*DEPLOY.glob("*.sh"), *DEPLOY.glob("*.sbatch")])
SRUN = REPOSITORY / "tests/launching/fake_srun.py"


def test_there_is_a_script_for_each_launcher():
    names = {path.name for path in SCRIPTS}
    assert {"horovodrun.sh", "mpirun.sh", "slurm.sbatch", "tf_config.sh"} <= names


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_run_from_anywhere(path):
    assert subprocess.run(["bash", "-n", path]).returncode == 0
    assert os.access(path, os.X_OK)
    assert path.read_text().startswith("#!/usr/bin/env bash\n")


def fake(tmp_path, name):
    """Puts a program first on the path that shows its arguments, TF_CONFIG with them."""
    program = tmp_path / "bin" / name
    program.parent.mkdir(exist_ok=True)
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$0" "$@"; echo "TF_CONFIG=$TF_CONFIG"\n')
    program.chmod(0o755)
    return {"PATH": f"{program.parent}:/usr/bin:/bin"}


def shown(script, environment, *flags):
    done = run(["bash", str(DEPLOY / script), *flags], 30, environment)
    return done.returncode, done.stdout.splitlines()


def test_horovodrun_counts_processes(tmp_path):
    environment = fake(tmp_path, "horovodrun") | {"HOSTS": "a:2,b:3", "NETWORK_INTERFACE": "ib0"}
    code, words = shown("horovodrun.sh", environment, "--steps=3")
    assert code == 0
    assert words[1:5] == ["-np", "5", "-H", "a:2,b:3"]
    assert words[words.index("--network-interfaces") + 1] == "ib0"
    assert words[-3:-1] == ["--strategy=horovod", "--steps=3"]
    for wrong in ("a", "a:x", "a:"):
        assert shown("horovodrun.sh", environment | {"HOSTS": wrong})[0] == 2, wrong
    assert shown("horovodrun.sh", environment | {"HOSTS": ""})[0] != 0


def test_mpirun_hands_the_first_host_on(tmp_path):
    environment = fake(tmp_path, "mpirun") | {"HOSTS": "a:2,b:2", "NETWORK_INTERFACE": ""}
    code, words = shown("mpirun.sh", environment, "--steps=3")
    assert code == 0
    assert {"--hosts=a", "--num_processes=4", "--cluster=mpi", "--strategy=horovod"} <= set(words)
    assert shown("mpirun.sh", environment | {"HOSTS": "a:x"})[0] == 2


def test_mpirun_hands_the_settings_of_horovod_nccl_and_tfbig_on(tmp_path):
    settings = {"NCCL_DEBUG": "INFO", "HOROVOD_CYCLE_TIME": "2", "TFBIG_GRACE_SECONDS": "7"}
    others = {"HOSTS": "a:2,b:2", "OMP_NUM_THREADS": "3", "MY_NCCL_DEBUG": "1", "NCCL_ALGO": ""}
    code, words = shown("mpirun.sh", fake(tmp_path, "mpirun") | others | settings)
    given = [following for word, following in itertools.pairwise(words) if word == "-x"]
    assert code == 0 and len(given) == len(set(given))
    assert {*settings, "OMP_NUM_THREADS", "PATH"} <= set(given)
    assert not {"MY_NCCL_DEBUG", "NCCL_ALGO", "HOSTS"} & set(given)


def test_tf_config_of_each_worker(tmp_path):
    environment = fake(tmp_path, "python") | {"HOSTS": "a,b:3333", "INDEX": "1"}
    code, words = shown("tf_config.sh", environment, "--steps=3")
    assert code == 0
    assert json.loads(words[-1].removeprefix("TF_CONFIG=")) == {
        "cluster": {"worker": ["a:2222", "b:3333"]},
        "task": {"type": "worker", "index": 1},
    }


def sbatch_options(path):
    return dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", path.read_text(), re.MULTILINE))


def test_slurm_files_ask_for_what_they_start():
    options = sbatch_options(DEPLOY / "slurm.sbatch")
    assert options["ntasks-per-node"] == "8" and options["gpus-per-task"] == "1"
    assert options["signal"] == "TERM@120"
    assert sbatch_options(DEPLOY / "slurm_multi_worker.sbatch")["ntasks-per-node"] == "1"


SHOWS_ITS_CORES = """#!/bin/sh
echo "$SLURM_PROCID of $SLURM_STEP_NUM_TASKS has ${SLURM_CPUS_PER_TASK:-1}: $*"
"""


@pytest.mark.parametrize("name", ["slurm.sbatch", "slurm_multi_worker.sbatch"])
def test_tasks_get_the_cores_that_sbatch_was_asked_for(name, tmp_path):
    cores = sbatch_options(DEPLOY / name)["cpus-per-task"]
    program = tmp_path / "shows_its_cores"
    program.write_text(SHOWS_ITS_CORES)
    program.chmod(0o755)
    # As sbatch sets it; what srun has from its own environment would hide what the file says.
    environment = with_srun(tmp_path, PYTHON=str(program), SRUN_CPUS_PER_TASK="")
    environment |= {"SLURM_CPUS_PER_TASK": cores, "SLURM_NTASKS_PER_NODE": "2"}
    code, lines = shown(name, environment, "--steps=3")
    assert code == 0 and len(lines) == 2
    for rank, line in enumerate(sorted(lines)):
        assert line.startswith(f"{rank} of 2 has {cores}: -m tfbig.")
        assert line.endswith(" --steps=3")


def with_srun(tmp_path, **extra):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/srun").symlink_to(SRUN)
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    # As sbatch sets it; nodes is this machine.
    return {"PATH": path, "PYTHON": sys.executable, "SLURM_NTASKS": "2"} | extra


@pytest.mark.distributed
def test_a_slurm_job_trains(tmp_path, small_flags):
    environment = with_srun(tmp_path, SLURM_NTASKS_PER_NODE="2", SLURM_JOB_ID=str(os.getpid()))
    flags = [*small_flags, f"--run_dir={tmp_path / 'run'}", "--steps=3", "--eval_every=0"]
    done = run(["bash", str(DEPLOY / "slurm.sbatch"), *flags, "--notensorboard"], 400, environment)
    assert done.returncode == 0, done.stdout
    assert "starts rank 1 of 2" in done.stdout
    assert (tmp_path / "run/checkpoints/step_00000003/manifest.json").is_file()
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["config"]["parallel"]["strategy"] == "horovod"


@pytest.mark.distributed
def test_tasks_that_do_not_find_each_other_are_refused(tmp_path, small_flags):
    environment = with_srun(tmp_path, SLURM_JOB_ID=str(os.getpid()))
    train = [sys.executable, "-m", "tfbig.train", "--strategy=horovod", f"--run_dir={tmp_path}/run"]
    done = run(["srun", "-n", "2", *train, *small_flags], 300, environment)
    assert done.returncode == 2, done.stdout
    assert "SLURM_STEP_NUM_TASKS=2, but this rank finds itself in a world of 1" in done.stdout
    assert not (tmp_path / "run").exists()


def test_the_mpijob_has_its_schemas_shape():
    job = yaml.safe_load((DEPLOY / "mpijob.yaml").read_text())
    assert misfits(job, MPIJOB) == []
    spec = job["spec"]
    launcher, worker = (spec["mpiReplicaSpecs"][name] for name in ("Launcher", "Worker"))
    container = launcher["template"]["spec"]["containers"][0]
    words = [*container["command"], *container["args"]]
    ranks = worker["replicas"] * spec["slotsPerWorker"]
    assert words[words.index("-np") + 1] == str(ranks)
    gpus = worker["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus == spec["slotsPerWorker"]
    pod = worker["template"]["spec"]
    # The image's entrypoint stays in front: it makes the host keys, which the image lacks.
    assert "command" not in pod["containers"][0]
    assert pod["containers"][0]["args"] == ["/usr/sbin/sshd", "-De"]
    mounts = {m["mountPath"]: m["name"] for m in pod["containers"][0]["volumeMounts"]}
    shm = next(v for v in pod["volumes"] if v["name"] == mounts["/dev/shm"])
    assert shm["emptyDir"]["medium"] == "Memory"
    flags = words[words.index("tfbig.train") + 1 :]
    config_from(dict(word[2:].split("=") for word in flags))  # flags that there are


@pytest.mark.parametrize(
    "change",
    [
        lambda job: job.update(apiVersion="kubeflow.org/v1"),
        lambda job: job["spec"].update(slotsPerWorker="8"),
        lambda job: job["spec"].pop("mpiReplicaSpecs"),
        lambda job: job["spec"].update(slotPerWorker=8),
        lambda job: job["spec"]["mpiReplicaSpecs"]["Worker"].update(restartPolicy="Always"),
    ],
)
def test_the_schema_finds_mistakes(change):
    job = copy.deepcopy(yaml.safe_load((DEPLOY / "mpijob.yaml").read_text()))
    change(job)
    assert len(misfits(job, MPIJOB)) == 1


def test_the_sagemaker_request_has_the_apis_shape():
    request = json.loads((DEPLOY / "sagemaker_training_job.json").read_text())
    assert misfits(request, TRAINING_JOB) == []
    given = {k: hyperparameter(v) for k, v in request["HyperParameters"].items()}
    assert given.pop("processes_per_host") == "8"
    config = config_from(given | {"steps": int(given["steps"])})
    assert config.run.steps == 100000
    line = "step     10/100000  loss 3.2171  4,290 tokens/s"
    pattern = request["AlgorithmSpecification"]["MetricDefinitions"][0]["Regex"]
    assert re.search(pattern, line)[1] == "3.2171"
    request["ResourceConfig"]["InstanceCount"] = "2"
    assert misfits(request, TRAINING_JOB) == [".ResourceConfig.InstanceCount: '2' is no int"]
