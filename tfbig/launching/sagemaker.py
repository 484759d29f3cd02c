"""SageMaker's contract for training containers: what it puts under /opt/ml and wants to find there.

Sources: the developer guide's pages "Dockerfile", "Your algorithm's inputs" and "outputs"; the
sagemaker-training-toolkit for the SM_ variables, which only containers with that toolkit have.
TensorFlow-free.
"""

import contextlib
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfbig.checkpoint import latest
from tfbig.errors import UserError
from tfbig.run_folder import RunFolder

_FAILURE_CHARACTERS = 1024  # of which a job's FailureReason is made
_DATA_CHANNELS = ("data", "train", "training")
_FOREIGN_CHANNELS = ("code", "sm_drivers")  # the SDK's own
_OURS = ("processes_per_host", "restarts", "network_interface")  # the launcher's, not train's
_TOOLKIT = "sagemaker_"  # hyperparameters of SageMaker's toolkit
_PER_HOST = "sagemaker_mpi_num_of_processes_per_host"


@dataclass(frozen=True)
class SageMakerJob:
    """What SageMaker has told this container.

    Args:
      root: /opt/ml.
      hosts: of the job, sorted.
      current_host: this one.
      network_interface: "" where it says none.
      hyperparameters: by name, quotes of the SDK taken off.
      channels: folder of each.
      channel_options: of each, as inputdataconfig.json has them.
      job_name: "" outside a job.
    """

    root: Path
    hosts: tuple[str, ...]
    current_host: str
    network_interface: str
    hyperparameters: Mapping[str, str | list[str]]
    channels: Mapping[str, Path]
    channel_options: Mapping[str, Mapping[str, Any]]
    job_name: str

    @property
    def index(self) -> int:
        """Which of the hosts this one is."""
        return self.hosts.index(self.current_host)


def read_job(root: Path, environ: Mapping[str, str] = os.environ) -> SageMakerJob:
    """Returns what SM_ variables say and, where they say nothing, the files under `root`.

    A container that is started by hand, without either, is a job of one host.

    Raises:
      UserError: a file or variable is damaged, or names no such host.
    """
    if not root.is_dir():
        raise UserError(
            f"there is no {root}: --cluster=sagemaker is for SageMaker's containers; give another "
            "root by --sagemaker_root."
        )
    folder = root / "input/config"
    resources = _read(folder / "resourceconfig.json")
    hosts = _variable(environ, "SM_HOSTS") or resources.get("hosts") or [socket.gethostname()]
    current = environ.get("SM_CURRENT_HOST") or resources.get("current_host") or hosts[0]
    if current not in hosts:
        raise UserError(
            f"resourceconfig.json says that this host is {current}, which is none of "
            f"{', '.join(hosts)}: put it right."
        )
    interface = environ.get("SM_NETWORK_INTERFACE_NAME") or resources.get("network_interface_name")
    given = _variable(environ, "SM_HPS") or _read(folder / "hyperparameters.json")
    options = _variable(environ, "SM_INPUT_DATA_CONFIG") or _read(folder / "inputdataconfig.json")
    names = set(_variable(environ, "SM_CHANNELS") or options)
    names |= {path.name for path in (root / "input/data").glob("*") if path.is_dir()}
    return SageMakerJob(
        root,
        tuple(sorted(hosts)),
        current,
        interface or "",
        {name.replace("-", "_"): hyperparameter(value) for name, value in given.items()},
        {
            name: Path(environ.get(f"SM_CHANNEL_{name.upper()}") or root / "input/data" / name)
            for name in sorted(names - set(_FOREIGN_CHANNELS))
        },
        options,
        environ.get("TRAINING_JOB_NAME", ""),
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}; put it right.") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object: put it right.")
    return value


def _variable(environ: Mapping[str, str], name: str) -> Any:
    try:
        return json.loads(environ.get(name) or "null")
    except ValueError:
        raise UserError(f"{name}={environ[name]} is no JSON: set it right, or not.") from None


def hyperparameter(value: Any) -> str | list[str]:
    r"""Returns a hyperparameter's text, or the texts of a list.

    Version 2 of SageMaker's SDK writes every value as JSON inside a string, version 3 leaves
    strings bare; numbers keep the digits they were written with.

    >>> hyperparameter('"adam"'), hyperparameter("adam"), hyperparameter("1e-4")
    ('adam', 'adam', '1e-4')
    """
    text = value if isinstance(value, str) else json.dumps(value)
    try:
        decoded = json.loads(text)
    except ValueError:
        return text
    if isinstance(decoded, str):
        return decoded
    if isinstance(decoded, list):
        return [part if isinstance(part, str) else json.dumps(part) for part in decoded]
    return "" if decoded is None else text


def launcher_settings(job: SageMakerJob) -> dict[str, str]:
    """Returns those hyperparameters that are the launcher's flags."""
    given = {name: str(job.hyperparameters[name]) for name in _OURS if name in job.hyperparameters}
    if _PER_HOST in job.hyperparameters:
        given.setdefault("processes_per_host", str(job.hyperparameters[_PER_HOST]))
    return given


def training_flags(job: SageMakerJob) -> list[str]:
    """Returns the flags of `tfbig train` that the job's hyperparameters and channels make.

    Raises:
      UserError: a channel cannot be trained from.
    """
    given = {
        name: value
        for name, value in job.hyperparameters.items()
        if name not in _OURS and not name.startswith(_TOOLKIT)
    }
    given = _paths(job, given) | given
    flags = []
    for name, value in given.items():
        values = value if isinstance(value, list) else [value]
        flags += [f"--{name}={one}" for one in values]
    return flags


def _paths(job: SageMakerJob, given: Mapping[str, object]) -> dict[str, str | list[str]]:
    """Returns run_dir, data and init_from, as far as hyperparameters leave them open."""
    paths: dict[str, str | list[str]] = {}
    if "run" in job.channels:  # a file system that all hosts have mounted
        paths["run_dir"] = str(job.channels["run"] / (job.job_name or "run"))
    else:
        paths["run_dir"] = str(job.root / "checkpoints/run")
    if "init_from" in job.channels:
        paths["init_from"] = str(_folder(job, "init_from"))
    name = next((name for name in _DATA_CHANNELS if name in job.channels), None)
    if name is None or "data" in given:
        return paths
    folder = _folder(job, name)
    if (folder / "manifest.json").is_file():
        return paths | {"data": str(folder)}
    if len(job.hosts) > 1:
        raise UserError(
            f"the channel {name} holds no prepared data, and {len(job.hosts)} hosts need the same: "
            "make it with `tfbig prepare` and give that folder."
        )
    prepared = Path(tempfile.gettempdir()) / f"tfbig_data_{job.job_name or 'job'}"
    return paths | {"source": str(folder), "data": str(prepared)}


def _folder(job: SageMakerJob, name: str) -> Path:
    """Returns a channel's folder, when each host finds all of it there."""
    options = job.channel_options.get(name, {})
    if options.get("TrainingInputMode", "File") == "Pipe":
        raise UserError(f"the channel {name} is a pipe: use the input mode File or FastFile.")
    if options.get("S3DistributionType") == "ShardedByS3Key" and len(job.hosts) > 1:
        raise UserError(
            f"the channel {name} is sharded over the hosts: use S3DistributionType FullyReplicated."
        )
    return job.channels[name]


def write_failure(root: Path, reason: str) -> None:
    """Writes why the job failed, unless that is written already or there is no root."""
    path = root / "output/failure"
    if path.exists() or not root.is_dir():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(reason[:_FAILURE_CHARACTERS], encoding="utf-8")
    except OSError as error:
        print(f"tfbig launch: {path} cannot be written: {error.strerror}", file=sys.stderr)


def read_reason(path: Path) -> str:
    """Returns the reason that a launcher has left, "" where there is none to be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def publish(root: Path, run_dir: str) -> None:
    """Puts what serves the model into `model`, and what tells of the run into `output/data`.

    `model` gets what `tfbig serve` reads: configuration, tokenizer and the newest checkpoint.

    Args:
      root: /opt/ml.
      run_dir: of the run; nothing happens before its first checkpoint.
    """
    run = RunFolder(run_dir)
    newest = latest(run.checkpoints_dir)
    if newest is None:
        return
    model, output = root / "model", root / "output/data"
    target = model / "checkpoints" / Path(newest.path).name
    target.parent.mkdir(parents=True, exist_ok=True)
    output.mkdir(parents=True, exist_ok=True)
    manifest = "manifest.json"  # last: a checkpoint without it doesn't exist
    shutil.copytree(
        newest.path, target, ignore=shutil.ignore_patterns(manifest), dirs_exist_ok=True
    )
    for path in (run.config_path, run.tokenizer_path):
        shutil.copy2(path, model / path.name)
    shutil.copy2(Path(newest.path) / manifest, target / manifest)
    for path in (run.metrics_path, run.events_path, run.report_path):
        with contextlib.suppress(FileNotFoundError):  # no report before the run's end
            shutil.copy2(path, output / path.name)
