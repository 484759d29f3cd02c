"""Starts real processes, under horovodrun or as a cluster, bounded in time and threads."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the environment of a test's processes: few threads, this checkout first."""
    values = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "60",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    return values | dict(extra or {})


def run(
    command: list[str], timeout: float, extra_environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess:
    """Runs a command in a session of its own; at the time limit all of it is ended."""
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=environment(extra_environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"no end within {timeout} s: {command}\n{output}") from None
    return subprocess.CompletedProcess(command, process.returncode, output)


def horovodrun(
    num_processes: int,
    arguments: list[str],
    timeout: float = 300,
    extra_environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess:
    """Runs `python ARGUMENTS` in each of the processes of one horovodrun."""
    command = [
        str(Path(sys.executable).parent / "horovodrun"),
        "-np",
        str(num_processes),
        sys.executable,
        *arguments,
    ]
    return run(command, timeout, extra_environment)


def free_ports(count: int) -> list[int]:
    """Returns ports of this machine that nothing listens on."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def run_cluster(num_processes: int, arguments: list[str], timeout: float) -> list[str]:
    """Runs `python ARGUMENTS` in each process of a cluster that TF_CONFIG describes.

    Returns:
      What each process printed; all of them ended well.
    """
    workers = [f"127.0.0.1:{port}" for port in free_ports(num_processes)]
    deadline = time.monotonic() + timeout
    files = [tempfile.TemporaryFile("w+") for _ in workers]
    processes = []
    for index, file in enumerate(files):
        place = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        processes.append(
            subprocess.Popen(
                [sys.executable, *arguments],
                cwd=REPOSITORY,
                env=environment({"TF_CONFIG": json.dumps(place)}),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        )
    try:
        while any(process.poll() is None for process in processes):
            failed = any(process.poll() for process in processes)
            if failed or time.monotonic() > deadline:
                time.sleep(5 if failed else 0)  # the others say why they end
                break
            time.sleep(0.1)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    outputs = []
    for file in files:
        file.seek(0)
        outputs.append(file.read())
        file.close()
    assert all(process.returncode == 0 for process in processes), "\n---\n".join(outputs)
    return outputs
