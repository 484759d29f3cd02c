"""The commands of docs/clusters.md and of the heads of deploy/'s files, with fakes at their ends.

They need hosts, Slurm, Docker or a cloud. Here the scripts run, and what they would start says how
it was called.
"""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from tests.deploy.test_files import DEPLOY
from tests.distributed.launch import REPOSITORY, run
from tests.test_readme import commands
from tfbig.errors import UserError
from tfbig.flags import Flags
from tfbig.launching.launch_config import LaunchConfig
from tfbig.train import config_from
from trainers import REACH

PAGE = REPOSITORY / "docs/clusters.md"
DOCKERFILE = REPOSITORY / "Dockerfile"
INLINE = re.compile(
    r"`((?:(?:[A-Z_]+=\S+ )+deploy/|(?:sbatch|kubectl|aws|docker|tfbig launch) )[^`\n]*)`"
)
HEAD = re.compile(r"^#   (\S.*)$", re.MULTILINE)
SHOW = '#!/bin/sh\nprintf "%s\\n" "${0##*/}" "$@" > "$SHOWN"\n'
# As sbatch does: its own options, then the file with its arguments.
SBATCH = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
SLURM_NTASKS=16 SLURM_CPUS_PER_TASK=8 exec bash "$@"
"""


def documented() -> list[str]:
    text = PAGE.read_text()
    files = [DOCKERFILE, *(path for path in DEPLOY.iterdir() if path.is_file())]
    heads = [line for path in sorted(files) for line in HEAD.findall(path.read_text())]
    return list(dict.fromkeys([*commands(PAGE, to_run=False), *INLINE.findall(text), *heads]))


def started_by(command: str, folder: Path) -> list[str]:
    """Returns the words of the program that a command comes down to."""
    folder.mkdir(exist_ok=True)
    names = "horovodrun mpirun srun python docker kubectl aws tfbig buildah debootstrap".split()
    for name, text in [*((name, SHOW) for name in names), ("sbatch", SBATCH)]:
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    shown = folder / "shown"
    shown.unlink(missing_ok=True)
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "SHOWN": str(shown)}
    done = run(["bash", "-c", command], 30, environment)
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return shown.read_text().splitlines()


def check_training(words: list[str]) -> None:
    """Checks the flags of what ranks on many hosts run."""
    flags = [word[2:].partition("=") for word in words[words.index("tfbig.train") + 1 :]]
    config = config_from({name: value for name, _, value in flags})
    assert REACH[config.parallel.strategy] == "cluster", words


def check_launch(words: list[str]) -> None:
    given = Flags("launch", (LaunchConfig,), "").parse(words, positional=True)
    assert given["cluster"] in ("hosts", "slurm", "mpi", "sagemaker")
    if "tfbig.train" in given["arguments"]:
        check_training(given["arguments"])


def check(words: list[str]) -> None:
    """Checks what a program was called with."""
    program, *rest = words
    if program == "docker":
        known = re.findall(r"^ARG (\w+)", DOCKERFILE.read_text(), re.MULTILINE)
        given = [rest[i + 1] for i, word in enumerate(rest) if word == "--build-arg"]
        assert {word.partition("=")[0] for word in given} <= set(known)
        assert rest[0] == "build" and rest[-1] == "."
    elif program == "kubectl":
        assert yaml.safe_load((REPOSITORY / rest[rest.index("-f") + 1]).read_text())["kind"]
    elif program == "aws":
        path = rest[rest.index("--cli-input-json") + 1].removeprefix("file://")
        assert json.loads((REPOSITORY / path).read_text())
    elif program == "tfbig":
        assert rest[0] == "launch"
        check_launch(rest[1:])
    elif "tfbig.launch" in rest:
        check_launch(rest[rest.index("tfbig.launch") + 1 :])
    else:
        check_training(rest)
    if program == "horovodrun":
        counts = [int(word.partition(":")[2]) for word in rest[rest.index("-H") + 1].split(",")]
        assert int(rest[rest.index("-np") + 1]) == sum(counts)


def test_documented_commands_start_what_they_should(tmp_path):
    programs = set()
    for command in documented():
        words = shlex.split(command)
        if "deploy/build_image.sh" in words:  # builds, in test-system
            continue
        started = started_by(command, tmp_path / "bin")
        try:
            check(started)
        except Exception as error:
            raise AssertionError(f"{command}\n{started}") from error
        programs.add(started[0])
    assert programs == {*"horovodrun mpirun srun python docker kubectl aws tfbig".split()}


@pytest.mark.parametrize(
    "command",
    [
        "docker build --build-arg EXTRAS=cpu .",
        "HOSTS=a,b INDEX=0 deploy/tf_config.sh --preset=gpt2_1558n",
        "sbatch deploy/slurm.sbatch --run_folder=/shared/run",
        "STRATEGY=single HOSTS=a:8,b:8 deploy/horovodrun.sh",
        "python -m tfbig.launch --cluster=hosts --host=a,b -- python -m tfbig.train",
        "kubectl apply -f deploy/job.yaml",
    ],
)
def test_mistakes_in_such_a_command_are_found(command, tmp_path):
    started = started_by(command, tmp_path / "bin")
    with pytest.raises((AssertionError, OSError, UserError)):
        check(started)
