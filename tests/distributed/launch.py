"""Starts real processes, under horovodrun or as a cluster, bounded in time and threads."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
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
        "TFBIG_GRACE_SECONDS": "5",
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


def seconds_since_fault(printed: str) -> float:
    """Returns how long ago the fault was of which a worker printed the time."""
    (at,) = re.findall(r"befell at ([\d.]+)", printed)
    return time.monotonic() - float(at)


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
    ended = start_ranks([arguments] * num_processes, tf_configs(num_processes), timeout)
    outputs = [process.stdout for process in ended]
    assert all(process.returncode == 0 for process in ended), "\n---\n".join(outputs)
    return outputs


def tf_configs(num_processes: int) -> list[dict[str, str]]:
    """Returns the environment of each process of a cluster on this machine."""
    workers = [f"127.0.0.1:{port}" for port in free_ports(num_processes)]
    return [
        {
            "TF_CONFIG": json.dumps(
                {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
            )
        }
        for index in range(num_processes)
    ]


def start_ranks(
    arguments: Sequence[list[str]],
    environments: Sequence[Mapping[str, str]],
    timeout: float,
    patience: float = 5.0,
) -> list[subprocess.CompletedProcess]:
    """Runs `python ARGUMENTS` in one process a rank, without a launcher.

    Args:
      arguments: of each rank.
      environments: of each rank, beside the tests'.
      timeout: seconds for all.
      patience: seconds that the others have when one has failed.

    Returns:
      Each rank's exit code and what it printed.
    """
    deadline = time.monotonic() + timeout
    files = [tempfile.TemporaryFile("w+") for _ in arguments]
    processes = [
        subprocess.Popen(
            [sys.executable, *own],
            cwd=REPOSITORY,
            env=environment(extra),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for own, extra, file in zip(arguments, environments, files, strict=True)
    ]
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):  # the others say why they end
                deadline = min(deadline, time.monotonic() + patience)
                patience = timeout  # counted once
            if time.monotonic() > deadline:
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
    return [
        subprocess.CompletedProcess(own, process.returncode, output)
        for own, process, output in zip(arguments, processes, outputs, strict=True)
    ]
