"""The CPU image, built without a daemon; a training of two processes inside it."""

import os
import shutil
import subprocess

import pytest

from tests.distributed.launch import REPOSITORY, free_ports

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not os.environ.get("TFBIG_IMAGE_TESTS"), reason="TFBIG_IMAGE_TESTS=1: long"),
]
BUILD_SECONDS, RUN_SECONDS = 3600, 1200
# Starting horovodrun as a user without a login shell or sshd: one host needs neither.
TRAIN = (
    "python -m tfbig.launch --cluster=hosts --hosts=localhost --host_index=0 --restarts=0"
    " --processes_per_host=2 -- python -m tfbig.train --strategy=horovod --steps=3 --eval_every=0"
    " --notensorboard --source=tree:/usr/lib/python3.11/asyncio --vocab_size=300"
    " --sequence_length=32 --max_length=32 --embed_dim=32 --num_layers=1 --num_heads=2"
    " --global_batch=4"
)


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """Builds it; everything is removed afterwards."""
    storage = tmp_path_factory.mktemp("images")
    environment = os.environ | {"STORAGE": str(storage)}
    environment["CERTIFICATES"] = os.environ.get("PIP_CERT", "")
    command = [str(REPOSITORY / "deploy/build_image.sh"), "tfbig:test"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=BUILD_SECONDS
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    where = ["--root", f"{storage}/root", "--runroot", f"{storage}/run"]
    yield ["buildah", *where, "--storage-driver", "vfs"]
    shutil.rmtree(storage)


# As the MPI operator starts a worker, whose user is root; a client then sees a host key.
SSHD = "/usr/local/bin/tfbig-entrypoint /usr/sbin/sshd -De -p {port}"
SEE_KEY = """
for _ in $(seq 50); do
  if ssh-keyscan -T 2 -p {port} 127.0.0.1 | grep -q ssh-ed25519; then kill $!; exit 0; fi
  sleep 0.2
done
kill $!
exit 1
"""


@pytest.fixture
def container(image):
    command = [*image, "from", "localhost/tfbig:test"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_sshd_starts_as_the_mpi_operator_starts_it(image, container):
    (port,) = free_ports(1)
    script = f"{SSHD} & {SEE_KEY}".format(port=port)
    inside = [*image, "run", "--isolation", "chroot", "--user", "root", container, "--"]
    command = [*inside, "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_two_processes_train_inside(image, container):
    inside = [*image, "run", "--isolation", "chroot", container, "--"]
    inside.append("/usr/local/bin/tfbig-entrypoint")
    who = subprocess.run([*inside, "id", "-un"], capture_output=True, text=True, timeout=60)
    assert who.stdout.strip() == "tfbig", who.stderr
    done = subprocess.run(
        [*inside, "sh", "-c", f"{TRAIN} && ls runs/*/checkpoints/*/manifest.json"],
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "step_00000003/manifest.json" in done.stdout
    bad = subprocess.run([*inside, "train"], capture_output=True, text=True, timeout=300)
    assert bad.returncode == 2 and "there is no /opt/ml" in bad.stderr
