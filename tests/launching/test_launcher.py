"""Launchers that meet and start their ranks, as real processes on this machine."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.distributed.launch import REPOSITORY, environment, free_ports, run
from tests.error_line import line_of
from tfbig import launch

SRUN = str(REPOSITORY / "tests/launching/fake_srun.py")
LAUNCH = [sys.executable, "-m", "tfbig.launch", "--restarts=0"]
SHOW = 'echo "r$HOROVOD_RANK/$HOROVOD_SIZE l$HOROVOD_LOCAL_RANK/$HOROVOD_LOCAL_SIZE"'


def shell(tmp_path, script):
    return ["--", "sh", "-c", script, "sh", f"--run_dir={tmp_path}"]


def start_hosts(tmp_path, scripts, *flags, only=None):
    """Starts a launcher a script, or one of them; all think that they are hosts of one job."""
    (port,) = free_ports(1)
    hosts = ",".join(["127.0.0.1", *(f"127.0.0.{i + 2}" for i in range(len(scripts) - 1))])
    common = [f"--port={port}", "--cluster=hosts", f"--hosts={hosts}", "--start_timeout=60", *flags]
    return [
        subprocess.Popen(
            [*LAUNCH, *common, f"--host_index={index}", *shell(tmp_path, script)],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index, script in enumerate(scripts)
        if only in (None, index)
    ]


def ends(processes, timeout=90):
    outputs = []
    try:
        for process in processes:
            outputs.append((*process.communicate(timeout=timeout), process.returncode))
    finally:
        for process in processes:
            process.kill()
    return outputs


def test_ranks_of_two_launchers_know_their_places(tmp_path):
    flags = ["--processes_per_host=2", "--num_processes=4"]
    first, second = ends(start_hosts(tmp_path, [SHOW] * 2, *flags))
    # The two are one machine, by its name: four local ranks.
    assert sorted(first[0].splitlines()) == ["[0] r0/4 l0/4", "[1] r1/4 l1/4"], first
    assert sorted(second[0].splitlines()) == ["[2] r2/4 l2/4", "[3] r3/4 l3/4"], second
    assert first[2] == second[2] == 0
    assert "starts ranks 2-3 of 4 on 1 host; network card lo" in second[1]


def test_the_first_rank_that_fails_ends_the_others_and_gives_code_and_reason(tmp_path):
    script = 'if [ $HOROVOD_RANK = 1 ]; then echo "tfbig train: error: bad"; exit 7; fi; sleep 600'
    start = time.monotonic()
    (one,) = ends(start_hosts(tmp_path, [script], "--processes_per_host=2"))
    assert one[2] == 7 and time.monotonic() - start < 60
    assert "rank 1 ended with code 7: tfbig train: error: bad" in one[1]


def test_a_world_of_another_size_is_refused_by_all(tmp_path):
    for one in ends(start_hosts(tmp_path, [SHOW] * 2, "--num_processes=3")):
        assert one[2] == 2 and not one[0]
        assert "--num_processes=3, but 2 launchers start 1 + 1 = 2 ranks" in one[1]


def test_hosts_that_do_not_come_are_named(tmp_path):
    (one,) = ends(start_hosts(tmp_path, [SHOW] * 2, "--start_timeout=2", only=0))
    assert one[2] == 1 and "the launchers of 127.0.0.2 have not come (1 of 2)" in one[1], one
    (two,) = ends(start_hosts(tmp_path, [SHOW] * 2, "--start_timeout=2", only=1))
    assert two[2] == 1 and "127.0.0.1 does not answer on port" in two[1], two


def test_launchers_of_mpirun_that_do_not_come_are_counted(tmp_path):
    (port,) = free_ports(1)
    command = [*LAUNCH, "--cluster=mpi", "--hosts=127.0.0.1", "--start_timeout=1"]
    place = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "12"}
    done = run([*command, f"--port={port}", *shell(tmp_path, SHOW)], 60, place)
    shown = ", ".join(map(str, range(1, 9)))
    assert done.returncode == 1, done.stdout
    assert f"launchers of index {shown} and 3 more have not come (11 of 12)" in done.stdout


def test_a_signal_lets_the_ranks_save_in_their_own_time(tmp_path):
    script = "trap 'sleep 1; echo saved; exit 143' TERM; echo ready; while :; do sleep 0.1; done"
    (process,) = start_hosts(tmp_path, [script], "--processes_per_host=2")
    assert process.stdout.readline().endswith("ready\n")
    assert process.stdout.readline().endswith("ready\n")
    process.send_signal(signal.SIGTERM)
    ((output, _, code),) = ends([process])
    assert code == 143 and sorted(output.splitlines()) == ["[0] saved", "[1] saved"]


def test_a_launcher_that_is_killed_takes_its_ranks_along(tmp_path):
    (process,) = start_hosts(tmp_path, ["echo $$; exec sleep 600"], "--processes_per_host=1")
    rank = int(process.stdout.readline())
    (launcher,) = psutil.Process(process.pid).children()
    launcher.send_signal(signal.SIGKILL)
    ends([process])
    deadline = time.monotonic() + 20
    while psutil.pid_exists(rank) and time.monotonic() < deadline:
        if psutil.Process(rank).status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.1)
    assert not psutil.pid_exists(rank) or psutil.Process(rank).status() == psutil.STATUS_ZOMBIE


def test_restarts_meet_again(tmp_path):
    script = f'DIR={tmp_path}; if [ -e "$DIR/$HOROVOD_RANK" ]; then echo again; exit 0; fi; '
    script += ': > "$DIR/$HOROVOD_RANK"; exit 1'
    flags = ["--restarts=2", "--restart_wait=0"]
    for one in ends(start_hosts(tmp_path, [script] * 2, *flags)):
        assert one[2] == 0 and one[0].endswith("again\n"), one


def test_tasks_of_a_slurm_step(tmp_path):
    script = SHOW + ' && echo "$TF_CONFIG" | grep -c 127.0.0.1'
    command = [SRUN, "-n", "3", *LAUNCH, "--cluster=slurm", *shell(tmp_path, script)]
    done = run(command, 90, {"SLURM_JOB_ID": str(os.getpid())})
    assert done.returncode == 0, done.stdout
    shown = sorted(line for line in done.stdout.splitlines() if " r" in line and "/" in line)
    assert [f"[{i}] r{i}/3 l{i}/3" for i in range(3)] == [s for s in shown if s.startswith("[")]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--cluster=slurm"], "outside a step of Slurm's"),
        (["--cluster=mpi"], "outside mpirun"),
        (["--cluster=hosts"], "--cluster=hosts needs --hosts"),
        (["--hosts=a,b"], "--hosts goes with --cluster=hosts, not none"),
        (["--cluster=hosts", "--hosts=a", "--port=70000"], "--port=70000 is no port"),
        (["--cluster=hosts", "--hosts=a", "--start_timeout=0"], "must be above 0"),
        (["--processes_per_host=-1"], "must be at least 0"),
        (["--cluster=slrum"], "Did you mean slurm"),
    ],
)
def test_mistakes_are_one_line(flags, words, capsys, monkeypatch):
    for name in ("SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert words in line_of(launch.main, [*flags, "--", "true"], capsys, "launch")


def test_a_card_that_is_not_there_and_a_port_that_is_taken(tmp_path):
    (one,) = ends(start_hosts(tmp_path, [SHOW], "--network_interface=wlan7"))
    assert one[2] == 2 and "--network_interface=wlan7 is no card of" in one[1]
    import socket

    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        command = [*LAUNCH, "--cluster=hosts", "--hosts=127.0.0.1", "--host_index=0"]
        done = run([*command, f"--port={port}", *shell(tmp_path, SHOW)], 60)
    assert done.returncode == 2 and f"port {port} of this host cannot be opened" in done.stdout
    assert not Path(tmp_path, "checkpoints").exists()
