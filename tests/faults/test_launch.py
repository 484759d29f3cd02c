"""`tfbig launch` starts a failed command again, while that gets it anywhere."""

import shlex
import signal
import subprocess
import sys

import numpy as np
import pytest

from tests.distributed.launch import environment
from tfbig import launch
from tfbig.checkpoint_format import RunState, Slice
from tfbig.checkpoint_writer import CheckpointWriter
from tfbig.errors import UserError
from tfbig.launching.launch_config import LaunchConfig

LAUNCH = [sys.executable, "-m", "tfbig.launch", "--"]
# Saves a checkpoint at each start and fails until its fourth.
JOB = """
import sys
sys.path.insert(0, {root!r})
from tests.faults.test_launch import save_next
raise SystemExit(0 if save_next({folder!r}) == 4 else 7)
"""


def save_next(folder: str) -> int:
    from tfbig.checkpoint import latest

    newest = latest(f"{folder}/checkpoints")
    step = 1 if newest is None else newest.step + 1
    slices = [Slice("kernel", (2,), (0,), np.ones(2), True)]
    CheckpointWriter(f"{folder}/checkpoints").save(step, slices, RunState())
    return step


def launch_here(*arguments: str) -> int:
    return launch._body(["--restart_wait=0", *arguments])


def job(folder, pytestconfig) -> list[str]:
    code = JOB.format(root=str(pytestconfig.rootpath), folder=str(folder))
    return [sys.executable, "-c", code, f"--run_dir={folder}"]


def test_a_failing_command_is_started_again(tmp_path, pytestconfig, capsys):
    assert launch_here("--restarts=5", "--", *job(tmp_path, pytestconfig)) == 0
    error = capsys.readouterr().err
    assert error.count("code 7 after") == 3 and "newest checkpoint: step 3" in error


def test_restarts_are_limited(tmp_path, pytestconfig):
    assert launch_here("--restarts=1", "--", *job(tmp_path, pytestconfig)) == 7


def test_a_smaller_layout_takes_over(tmp_path, pytestconfig, capsys):
    smaller = shlex.join(job(tmp_path, pytestconfig))
    command = ["sh", "-c", "exit 9", f"--run_dir={tmp_path}"]
    flags = [f"--shrunk={smaller}", "--restarts=9"]
    assert launch_here(*flags, "--", *command) == 0
    error = capsys.readouterr().err
    assert error.count("code 9 after") == 2 and error.count("the smaller layout takes over") == 1
    assert error.count("code 7 after") == 3  # it gets somewhere, and is not given up


def test_a_smaller_layout_that_gets_nowhere_is_given_up(tmp_path, capsys):
    command = ["sh", "-c", "exit 9", f"--run_dir={tmp_path}"]
    flags = [f"--shrunk=sh -c 'exit 8' --run_dir={tmp_path}", "--shrink_after=1", "--restarts=50"]
    assert launch_here(*flags, "--", *command) == 8
    error = capsys.readouterr().err
    assert error.count("code 9 after") == 1 and error.count("code 8 after") == 3


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--shrunk=train --run_dir=other"], "trains in other"),
        (["--shrunk=it's"], "is no command"),
        (["--shrunk=train", "--cluster=slurm"], "--cluster=slurm"),
        (["--shrink_after=0"], "--shrink_after=0 must be at least 1"),
    ],
)
def test_a_smaller_layout_that_cannot_be(flags, words, tmp_path):
    with pytest.raises(UserError, match=words):
        launch_here(*flags, "--", "true", f"--run_dir={tmp_path}")


def test_what_gets_nowhere_is_given_up(tmp_path, capsys):
    command = ["sh", "-c", "echo started; exit 9", f"--run_dir={tmp_path}"]
    assert launch_here("--restarts=50", "--", *command) == 9
    assert "3 failures without a new checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, 2, 143])
def test_done_mistaken_and_stopped_are_final(code, tmp_path, capsys):
    assert launch_here("--", "sh", "-c", f"exit {code}", f"--run_dir={tmp_path}") == code
    assert "restart" not in capsys.readouterr().err


@pytest.mark.distributed
@pytest.mark.parametrize("code", [2, 143])
def test_what_a_rank_under_horovodrun_ended_with_is_final(code, tmp_path, capfd):
    command = ["horovodrun", "-np", "1", "sh", "-c", f"echo because >&2; exit {code}"]
    assert launch_here("--", *command, f"--run_dir={tmp_path}") == code
    error = capfd.readouterr().err
    assert "because" in error and f"Exit code: {code}" in error and "restart" not in error


@pytest.mark.distributed
def test_a_rank_that_fails_under_horovodrun_is_started_again(tmp_path, capfd):
    text = "echo Exit code: 2 >&2; kill -9 $$"  # what a rank says counts for nothing
    command = ["horovodrun", "-np", "1", "sh", "-c", text, f"--run_dir={tmp_path}"]
    assert launch_here("--restarts=1", "--", *command) == 137
    assert capfd.readouterr().err.count("code 137 after") == 2


RANK_THAT_SAVES = """
import signal, sys, time
def save(number, frame):
    time.sleep(0.5)
    print("saved", flush=True)
    sys.exit(143)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, save)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_has_ranks_save_under_horovodrun_which_waits(name, tmp_path):
    rank = ["horovodrun", "-np", "1", sys.executable, "-c", RANK_THAT_SAVES]
    process = subprocess.Popen(
        [*LAUNCH, *rank, f"--run_dir={tmp_path}"],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert any("ready" in line for line in process.stdout)
        process.send_signal(getattr(signal, name))
        assert process.wait(timeout=60) == 143
        # It was there to hear the rank to its end.
        rest = process.stdout.read()
        assert "saved" in rest and "Process 0 exit with status code 143" in rest
    finally:
        process.kill()
        process.communicate()


def test_mpirun_gets_the_signal_that_it_hands_on():
    def passed(*command: str) -> int:
        return launch.Supervisor(LaunchConfig(), command, "run")._passed(signal.SIGUSR1)

    assert passed("/usr/bin/mpirun", "-np", "2", "python") == signal.SIGUSR1
    assert passed("python", "-m", "tfbig.train") == signal.SIGTERM


def test_a_signal_reaches_the_command_and_ends_it(tmp_path):
    command = "trap 'echo saved; exit 1' TERM; echo ready; while true; do sleep 0.05; done"
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tfbig.launch",
            "--",
            "bash",
            "-c",
            command,
            f"--run_dir={tmp_path}",
        ],
        env=environment(),
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 143
        assert process.stdout.read() == b"saved\n"
    finally:
        process.kill()
        process.communicate()


def test_mistakes():
    with pytest.raises(UserError, match="behind --"):
        launch_here()
    with pytest.raises(UserError, match="cannot start nowhere: No such file"):
        launch_here("--", "nowhere")
    assert launch._run_dir(["train", "--run_dir", "a/b", "--preset=x"]) == "a/b"
    assert launch._run_dir(["train", "--preset", "x"]) == "runs/x"
