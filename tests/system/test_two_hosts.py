"""Two hosts train as one does, and see what is wrong with one of them."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.launch import run
from tests.system.on_hosts import HOROVODRUN, LAYOUTS, TRAIN, losses, on_host

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not os.environ.get("TFBIG_SYSTEM_TESTS"), reason="make test-system runs it"),
    pytest.mark.usefixtures("healed"),
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory, small_flags):
    """The losses of one device."""
    folder = tmp_path_factory.mktemp("single")
    command = [sys.executable, *TRAIN, *small_flags, "--strategy=single", "--steps=4"]
    done = run([*command, f"--run_dir={folder / 'run'}"], 400)
    assert done.returncode == 0, done.stdout
    return losses(folder / "run")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_hosts_train_as_one_does(layout, reference, tmp_path, small_flags):
    flags = [*small_flags, *LAYOUTS[layout], "--steps=4", f"--run_dir={tmp_path / 'run'}"]
    if layout == "p2":
        flags.append("--num_layers=2")
    done = run(on_host("h1", [*HOROVODRUN, *TRAIN, *flags]), 500)
    assert done.returncode == 0, done.stdout
    if layout == "p2":
        assert len(losses(tmp_path / "run")) == 4
        flags = [f for f in flags if "pipeline" not in f and "microbatches" not in f]
        flags = [*flags, "--strategy=single", f"--run_dir={tmp_path / 'single'}"]
        done = run([sys.executable, *TRAIN, *flags], 400)
        assert done.returncode == 0, done.stdout
        reference = losses(tmp_path / "single")
    assert losses(tmp_path / "run") == pytest.approx(reference, rel=1e-5)


def test_a_run_folder_that_only_one_host_sees_is_refused(tmp_path, small_flags):
    (tmp_path / "own").mkdir()
    flags = [*small_flags, "--strategy=horovod", "--steps=2", f"--run_dir={tmp_path / 'own/run'}"]
    train = shlex.join([sys.executable, *TRAIN, *flags])
    # h2 has a disk of its own there.
    hidden = f"mount -t tmpfs none {tmp_path / 'own'} && exec {train}"
    script = f"[ $(hostname) = h2 ] && exec unshare -m sh -c {shlex.quote(hidden)}; exec {train}"
    done = run(on_host("h1", [*HOROVODRUN[:-1], "bash", "-c", script]), 400)
    assert done.returncode != 0
    assert "rank 1 does not see" in done.stdout, done.stdout
    assert "--run_dir must be on a file system that all hosts share" in done.stdout
    assert not (tmp_path / "own/run").exists()


def test_the_doctor_sees_both_hosts_and_a_folder_that_one_lacks(tmp_path):
    (tmp_path / "own").mkdir()
    doctor = f"{sys.executable} -m tfbig.doctor --megabytes=2 --json --run_dir={tmp_path}/own/run"
    hidden = f"mount -t tmpfs none {tmp_path / 'own'} && exec {doctor}"
    script = f"[ $(hostname) = h2 ] && exec unshare -m sh -c {shlex.quote(hidden)}; exec {doctor}"
    done = run(on_host("h1", [*HOROVODRUN[:-1], "bash", "-c", script]), 400)
    (line,) = [line for line in done.stdout.splitlines() if '{"problems"' in line]
    found = json.loads(line[line.index("{") :])["findings"]
    assert done.returncode != 0
    shared = [f for f in found if "does not see" in f["text"]]
    assert len(shared) == 1 and shared[0]["hosts"] == ["h2"] and shared[0]["level"] == "problem"
    measured = [f["text"] for f in found if f["group"] == "bandwidth"]
    assert any(text.startswith("h1-h2: ") for text in measured), measured


def launched_on_both(command: list[str]) -> tuple[str, str]:
    """Returns what our own launchers of h1 and of h2 print; both end well."""
    launch = [sys.executable, "-m", "tfbig.launch", "--cluster=hosts", "--hosts=h1,h2"]
    command = [*launch, "--num_processes=2", "--restarts=0", "--", *command]
    other = subprocess.Popen(
        on_host("h2", command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        first = run(on_host("h1", command), 400)
        second = other.communicate(timeout=60)[0]
    finally:
        other.kill()
    assert first.returncode == other.returncode == 0, first.stdout + second
    return first.stdout, second


def test_our_own_launcher_meets_over_the_network_without_ssh(tmp_path, small_flags):
    flags = [*small_flags, "--strategy=horovod", "--steps=3", f"--run_dir={tmp_path / 'run'}"]
    _, second = launched_on_both([sys.executable, *TRAIN, *flags])
    assert "h2 starts rank 1 of 2 on 2 hosts; network card eth0" in second
    assert len(losses(tmp_path / "run")) == 3


def test_a_first_host_that_takes_its_own_name_for_127_0_1_1_as_debian_sets_it_up(hosts):
    file = Path("/etc/netns/h1/hosts")  # written in place: h1's processes have it mounted
    before = file.read_text()
    show = f'echo "$HOROVOD_GLOO_IFACE $TF_CONFIG"; exec {sys.executable} -m tfbig.horovod_selftest'
    file.write_text(before.replace("10.99.0.1 h1", "127.0.1.1 h1"))
    try:
        name = run(on_host("h1", ["getent", "hosts", "h1"]), 30)
        outputs = launched_on_both(["sh", "-c", show])
    finally:
        file.write_text(before)
    assert name.stdout.split() == ["127.0.1.1", "h1"]
    for rank, output in enumerate(outputs):
        assert f"h{rank + 1} starts rank {rank} of 2 on 2 hosts; network card eth0" in output
        (line,) = [line for line in output.splitlines() if "cluster" in line]
        assert "eth0 {" in line and '["10.99.0.1:7778", "10.99.0.2:7778"]' in line, line
        assert f"rank {rank} of 2: passed" in output
