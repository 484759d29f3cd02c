"""The image's files: what its entrypoint starts, and what gets into its build."""

import re
import subprocess

import pytest

from tests.deploy.test_files import DEPLOY, fake
from tests.distributed.launch import REPOSITORY, run

DOCKERFILE = (REPOSITORY / "Dockerfile").read_text()


@pytest.mark.parametrize(
    ("words", "started"),
    [
        (["train"], ["-m", "tfbig.launch", "--cluster=sagemaker"]),
        (["train", "--restarts=1"], ["-m", "tfbig.launch", "--cluster=sagemaker", "--restarts=1"]),
        (["serve"], ["-m", "tfbig.serve", "--run=/opt/ml/model", "--host=0.0.0.0", "--port=8080"]),
        (["python", "-m", "tfbig.train", "--steps=3"], ["-m", "tfbig.train", "--steps=3"]),
    ],
)
def test_the_entrypoint_becomes_the_program(words, started, tmp_path):
    environment = fake(tmp_path, "python")
    done = run(["/bin/sh", str(DEPLOY / "entrypoint"), *words], 30, environment)
    assert done.returncode == 0 and done.stdout.splitlines()[1:-1] == started


def test_sshd_starts_with_host_keys_of_its_own(tmp_path):
    assert "/etc/ssh/ssh_host_*" in DOCKERFILE  # equal keys in all containers would be no secret
    environment = fake(tmp_path, "ssh-keygen") | fake(tmp_path, "sshd")
    done = run(
        ["/bin/sh", str(DEPLOY / "entrypoint"), f"{tmp_path}/bin/sshd", "-De"], 30, environment
    )
    words = [line for line in done.stdout.splitlines() if not line.startswith("TF_CONFIG")]
    assert done.returncode == 0
    assert words == [f"{tmp_path}/bin/ssh-keygen", "-A", f"{tmp_path}/bin/sshd", "-De"]


def test_the_entrypoint_is_of_exec_form_and_parses():
    assert re.search(r'^ENTRYPOINT \["/usr/local/bin/tfbig-entrypoint"\]$', DOCKERFILE, re.M)
    text = (DEPLOY / "entrypoint").read_text()
    starts = [line for line in text.splitlines() if "python" in line or '"$@"' in line]
    assert starts and all(line.strip().startswith("exec ") for line in starts)
    assert subprocess.run(["sh", "-n", DEPLOY / "entrypoint"]).returncode == 0


def test_what_is_copied_is_what_the_build_may_see():
    copied = set()
    for sources in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.M):
        copied |= set(sources.split())
    ignore = (REPOSITORY / ".dockerignore").read_text().splitlines()
    assert ignore[1] == "*"
    assert copied == {line[1:] for line in ignore if line.startswith("!")}
    assert all((REPOSITORY / name).exists() for name in copied)


def test_the_image_does_not_run_as_root_unless_asked():
    users = re.findall(r"^USER (.+)$", DOCKERFILE, re.M)
    assert users == ["${RUN_AS}"] and re.search(r"^ARG RUN_AS=tfbig$", DOCKERFILE, re.M)
