"""From Horovod's source release to a wheel with tfbig's edits, kept in a cache."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tfbig import durable_file
from tfbig.errors import UserError
from tfbig.horovod_build import HOROVOD_VERSION, SDIST_SHA256, cache_folder
from tfbig.horovod_edits import BUILD_RECORD, apply_edits

SDIST_NAME = f"horovod-{HOROVOD_VERSION}.tar.gz"
# What Horovod's setup.py imports, and what builds the wheel.
_BUILD_REQUIREMENTS = ("setuptools", "wheel", "cloudpickle", "psutil", "pyyaml", "packaging")
_BUILD_TIMEOUT = 3600  # seconds
_PIP_TIMEOUT = 900


class InstallFailed(Exception):
    """A download, build or test failed; the text holds the end of its output."""


def say(message: str) -> None:
    print(f"install_horovod: {message}", flush=True)


def run_bounded(
    command: Sequence[str], timeout: float, log: Path | None = None, **options: Any
) -> tuple[int, str]:
    """Runs a command without stdin, in a session of its own that ends with it or at the timeout.

    Args:
      command: the program and its arguments.
      timeout: seconds; then the session gets SIGTERM, and 15 seconds later SIGKILL.
      log: where the output goes as well.
      **options: for subprocess.Popen, e.g. env and cwd.

    Returns:
      The exit code, -signal where one ended it, and the output, stderr included.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **options,
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)  # horovodrun gives its processes five
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")
    if log is not None:
        log.write_text(text)
    return process.returncode, text


def last_lines(text: str, count: int = 30) -> str:
    return "\n".join(f"  | {line}" for line in text.rstrip().splitlines()[-count:])


def pip(*arguments: str, timeout: float = _PIP_TIMEOUT, **options: Any) -> str:
    """Runs this Python's pip, with the user's configuration: index, proxy, mirror."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    code, text = run_bounded(command, timeout, **options)
    if "No module named pip" in text:
        raise UserError(f"{sys.executable} has no pip: run `{sys.executable} -m ensurepip`")
    if code:
        raise InstallFailed(f"pip {arguments[0]} ended with {code}:\n{last_lines(text)}")
    return text


@contextlib.contextmanager
def exclusive(path: Path, waiting_for: str) -> Iterator[None]:
    """Holds a lock file; the kernel drops the lock of a process that dies.

    Args:
      path: the lock file, which stays.
      waiting_for: what to tell the user when another process holds it.
    """
    try:
        file = path.open("a")
    except OSError as error:
        raise UserError(
            f"cannot write to {path.parent} ({error.strerror}): use a virtual environment "
            f"(python3 -m venv .venv) and a TFBIG_CACHE of yours"
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for {waiting_for}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def check_sdist(path: Path) -> None:
    """Raises a UserError unless the file is Horovod's source release, byte for byte."""
    try:
        found = durable_file.digest_file(path).sha256
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    if found != SDIST_SHA256:
        raise UserError(
            f"{path} is not {SDIST_NAME}: its sha256 is {found}, not {SDIST_SHA256}; "
            f"remove it and try again"
        )


def fetch_sdist(cache: Path, scratch: Path) -> Path:
    """Returns Horovod's source release, from the cache or by pip.

    pip compares the hash before it runs anything of what it downloaded, even its setup.py for the
    metadata; it then needs the build's requirements to be installed.

    Args:
      cache: keeps the file.
      scratch: an empty folder on the same file system.
    """
    kept = cache / SDIST_NAME
    if kept.exists():
        try:
            check_sdist(kept)
            return kept
        except UserError as error:
            say(f"{error} (downloading it again)")
    say(f"downloading Horovod {HOROVOD_VERSION}")
    requirements = scratch / "horovod.txt"
    requirements.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{SDIST_SHA256}\n")
    pip(
        *("download", "--requirement", str(requirements), "--dest", str(scratch)),
        *("--no-deps", "--no-binary", "horovod", "--no-build-isolation"),
    )
    check_sdist(scratch / SDIST_NAME)
    os.replace(scratch / SDIST_NAME, kept)
    return kept


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpacks the source release and returns the folder that holds setup.py."""
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):  # Python 3.10.12, 3.11.4 and later
            archive.extractall(folder, filter="data")
        else:
            archive.extractall(folder)  # its sha256 is the one we know
    return folder / SDIST_NAME.removesuffix(".tar.gz")


def install_build_requirements() -> None:
    """Installs what the build imports, if anything of it is missing."""
    missing = []
    for name in _BUILD_REQUIREMENTS:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        say(f"installing {', '.join(missing)}")
        pip("install", "--quiet", *missing)


def check_compiler(environ: Mapping[str, str]) -> None:
    """Raises a UserError unless a C++ compiler and make are there."""
    compilers = [environ["CXX"].split()[0]] if environ.get("CXX") else ["c++", "g++", "clang++"]
    if not any(map(shutil.which, compilers)):
        raise UserError(
            f"no C++ compiler ({', '.join(compilers)}) to build Horovod with: install one, "
            f"e.g. `apt-get install g++ make`"
        )
    if not shutil.which("make"):
        raise UserError("no make to build Horovod with: install it, e.g. `apt-get install make`")


def find_cmake(environ: Mapping[str, str], scratch: Path) -> str:
    """Returns a CMake >= 3.13: $HOROVOD_CMAKE, the machine's, or PyPI's, put into `scratch`."""
    if environ.get("HOROVOD_CMAKE"):
        return environ["HOROVOD_CMAKE"]
    cmake = shutil.which("cmake")
    if cmake:
        _, text = run_bounded([cmake, "--version"], 60)
        version = re.search(r"version (\d+)\.(\d+)", text)
        if version and (int(version[1]), int(version[2])) >= (3, 13):
            return cmake
    say("fetching cmake from PyPI, for this build only")
    # A venv of its own would do as well; the program inside needs neither Python nor the venv.
    pip("install", "--quiet", "--no-deps", "--target", str(scratch / "cmake"), "cmake>=3.13")
    found = sorted((scratch / "cmake").glob("cmake/data/bin/cmake"))
    if not found:
        raise InstallFailed(
            "PyPI's cmake package holds no cmake where it used to: install cmake >= 3.13 "
            "and set HOROVOD_CMAKE to it"
        )
    return str(found[0])


def num_build_jobs() -> int:
    """Returns one job a core, but no more than one for every 2 GiB of the machine's memory."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory_bytes // (2 << 30)))


def build_wheel(tree: Path, record: Mapping[str, Any], scratch: Path, log: Path) -> Path:
    """Builds the edited tree.

    Args:
      tree: the source, edits applied.
      record: goes into the package.
      scratch: for cmake and the wheel.
      log: gets the whole output.

    Returns:
      The wheel, in `scratch`.
    """
    (tree / "horovod" / BUILD_RECORD).write_text(json.dumps(record, indent=1, sort_keys=True))
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKELEVEL", "MFLAGS")
    }
    environment |= record["options"]
    environment |= {
        "HOROVOD_CMAKE": find_cmake(os.environ, scratch),
        # Shown by `pip list`: another Horovod than PyPI's.
        "HOROVOD_LOCAL_VERSION": f"tfbig.{record['edits_sha256'][:8]}",
        # CMake looks for `python`: this one.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "MAKEFLAGS": f"-j{num_build_jobs()}",
        "CUDA_VISIBLE_DEVICES": "",
    }
    pip(
        *("wheel", "--no-build-isolation", "--no-deps", "--no-cache-dir", "--verbose"),
        *("--wheel-dir", str(scratch / "wheel"), str(tree)),
        timeout=_BUILD_TIMEOUT,
        env=environment,
        log=log,
    )
    (wheel,) = (scratch / "wheel").glob("horovod-*.whl")
    return wheel


def cached_wheel(folder: Path) -> Path | None:
    """Returns the wheel in a folder of the cache, None where it is missing or damaged."""
    try:
        kept = json.loads((folder / "wheel.json").read_text())
        wheel = folder / kept["file"]
        intact = durable_file.digest_file(wheel).sha256 == kept["sha256"]
    except (OSError, ValueError, KeyError):
        return None
    return wheel if intact else None


def keep_wheel(wheel: Path, folder: Path) -> Path:
    """Moves a wheel into the cache; its description is written last, so that none is half there."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / wheel.name
    durable_file.unlink_quietly(folder / "wheel.json")
    os.replace(wheel, kept)
    description = {"file": kept.name, "sha256": durable_file.digest_file(kept).sha256}
    durable_file.write_atomic(folder / "wheel.json", json.dumps(description).encode())
    return kept


def obtain_wheel(record: Mapping[str, Any], sdist: Path | None, rebuild: bool) -> Path:
    """Returns the wheel for a record, from the cache or built now, one build at a time.

    Args:
      record: of horovod_build.build_record.
      sdist: a source release already at hand, None to download it.
      rebuild: whether a wheel in the cache is left aside.
    """
    cache = cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        durable_file.write_atomic(cache / "README", b"Wheels of tfbig's Horovod; may be deleted.\n")
    except OSError as error:
        raise UserError(
            f"cannot write to {cache} ({error.strerror}): set TFBIG_CACHE to a folder of yours"
        ) from None
    with exclusive(cache / "lock", "another build"):
        wheel = None if rebuild else cached_wheel(cache / record["key"])
        if wheel is not None:
            say(f"using {wheel}")
            return wheel
        for leftover in cache.glob("scratch-*"):  # of a build that was killed: we hold the lock
            shutil.rmtree(leftover, ignore_errors=True)
        check_compiler(os.environ)
        install_build_requirements()
        with tempfile.TemporaryDirectory(dir=cache, prefix="scratch-") as name:
            scratch = Path(name)
            if sdist is None:
                sdist = fetch_sdist(cache, scratch)
            else:
                check_sdist(sdist)
            tree = unpack(sdist, scratch)
            apply_edits(tree)
            say(f"building for {record['tensorflow']} {record['tensorflow_version']}: minutes")
            log = cache / f"{record['key']}.log"
            started = time.monotonic()
            try:
                wheel = build_wheel(tree, record, scratch, log)
            except InstallFailed as error:
                raise InstallFailed(f"{error}\n  whole output: {log}") from None
            say(f"built in {time.monotonic() - started:.0f} s")
            return keep_wheel(wheel, cache / record["key"])
