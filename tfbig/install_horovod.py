"""Downloads, edits, builds, installs and tests Horovod: `python -m tfbig.install_horovod`.

Takes about two minutes on two cores the first time, then seconds: the wheel is kept in a cache.
Build options are Horovod's own environment variables, e.g. HOROVOD_GPU_OPERATIONS=NCCL with
HOROVOD_CUDA_HOME, HOROVOD_NCCL_HOME and HOROVOD_BUILD_CUDA_CC_LIST=80,90. PyPI's NCCL
(site-packages/nvidia/nccl) lacks the name that linkers look for: make a link lib/libnccl.so to
libnccl.so.2 in it. HOROVOD_WITH_MPI=1 adds MPI.
"""

import argparse
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NoReturn

from tfbig.command import run_command
from tfbig.errors import UserError, near_matches
from tfbig.horovod_build import (
    build_options,
    build_record,
    check_installed,
    find_tensorflow,
    installed_record,
)
from tfbig.horovod_wheel import (
    SDIST_NAME,
    InstallFailed,
    exclusive,
    last_lines,
    obtain_wheel,
    pip,
    run_bounded,
    say,
)

_SELF_TEST_TIMEOUT = 240  # seconds


def self_test(options: Mapping[str, str]) -> None:
    """Proves the installed Horovod: what it was built with, and two processes that really reduce.

    Args:
      options: the build's; MPI and NCCL are looked for when they were asked for.

    Raises:
      InstallFailed: with the output of what failed.
    """
    horovodrun = str(Path(sys.executable).parent / "horovodrun")
    package_root = str(Path(__file__).resolve().parent.parent)
    environment = dict(os.environ)
    environment |= {
        "PYTHONPATH": os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")])),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",  # two ranks may not share a GPU, and there may be but one
        "OMP_NUM_THREADS": "1",
        # Should the collective be pruned on one rank only, the other one doesn't wait for ever.
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "20",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "40",
    }
    say("testing it: what it was built with")
    # It says [X] PyTorch whenever Horovod can be imported, and ends with 0 whatever it finds.
    wanted = ["TensorFlow", "Gloo"]
    wanted += ["MPI"] if "HOROVOD_WITH_MPI" in options else []
    wanted += ["NCCL"] if options.get("HOROVOD_GPU_OPERATIONS") == "NCCL" else []
    code, text = run_bounded(
        [sys.executable, horovodrun, "--check-build"], _SELF_TEST_TIMEOUT, env=environment
    )
    absent = [name for name in wanted if not re.search(rf"\[X\] {name}\s*$", text, re.MULTILINE)]
    if code or absent:
        raise InstallFailed(
            f"`horovodrun --check-build` does not list {', '.join(absent)}:\n{last_lines(text)}"
        )
    say("testing it: two processes")
    worker = [sys.executable, "-m", "tfbig.horovod_selftest"]
    code, text = run_bounded(
        [sys.executable, horovodrun, "--gloo", "-np", "2", *worker],
        _SELF_TEST_TIMEOUT,
        env=environment,
    )
    passed = re.findall(r"rank (\d) of 2: passed", text)
    if code or sorted(passed) != ["0", "1"]:
        raise InstallFailed(f"the two-process test ended with {code}:\n{last_lines(text)}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


def install(sdist: Path | None = None, rebuild: bool = False) -> None:
    """Makes the installed Horovod tfbig's build for the installed TensorFlow, and tests it.

    Args:
      sdist: the source release, for machines without a package index.
      rebuild: whether to build even if the wheel is in the cache.
    """
    tensorflow = find_tensorflow()
    options = build_options(os.environ)
    if tensorflow.name == "tensorflow-cpu" and any(
        name.startswith("HOROVOD_GPU") for name in options
    ):
        raise UserError(
            "HOROVOD_GPU... is set, but tensorflow-cpu is installed: uninstall it, run "
            "`pip install 'tfbig[gpu]'`, then try again"
        )
    record = build_record(tensorflow, options)
    # One process at a time changes this Python's packages.
    with exclusive(Path(sys.prefix) / ".tfbig-install-horovod.lock", "another installation"):
        installed = installed_record()
        if rebuild or installed is None or installed.get("key") != record["key"]:
            wheel = obtain_wheel(record, sdist, rebuild)
            pip("install", "--quiet", "--no-deps", "--no-index", "--force-reinstall", str(wheel))
        check_installed()
        self_test(options)
    say(f"Horovod {metadata.version('horovod')} for {tensorflow} works")


def main(arguments: Sequence[str]) -> int:
    """Runs the command; `--check` only looks."""
    parser = _Parser(prog="python -m tfbig.install_horovod", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether it fits")
    parser.add_argument(
        "--rebuild", action="store_true", help="build it even if it is in the cache"
    )
    parser.add_argument("--sdist", type=Path, help=f"a {SDIST_NAME} that you downloaded yourself")
    flags, unknown = parser.parse_known_args(arguments)
    if unknown:
        matches = near_matches(unknown[0], ["--check", "--rebuild", "--sdist"])
        parser.error(f"{unknown[0]} is not one of its flags.{matches}")
    if flags.check:
        check_installed()
        say(f"Horovod {metadata.version('horovod')} fits {find_tensorflow()}")
        return 0
    # What it started ends with it: a build runs in a session of its own.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        install(flags.sdist, flags.rebuild)
    except InstallFailed as error:
        print(f"install_horovod: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    run_command("install_horovod", main, sys.argv[1:])
