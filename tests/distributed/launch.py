"""Starts real processes under horovodrun, bounded in time and threads."""

import os
import signal
import subprocess
import sys
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
