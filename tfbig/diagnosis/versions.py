"""Versions of Python, TensorFlow, Horovod, NCCL and tfbig itself. TensorFlow-free."""

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from tfbig.diagnosis.finding import Examined
from tfbig.errors import UserError
from tfbig.horovod_build import check_installed, find_tensorflow, installed_record
from tfbig.run_folder import installed_versions

_PROBE_SECONDS = 240.0
# Imports what training does and says which GPUs TensorFlow sees; no device is touched.
_PROBE = (
    "import json, trainers.collectives, tensorflow as tf; "
    "from tfbig.diagnosis.versions import loaded_nccl; "
    "print(json.dumps({'gpus': len(tf.config.list_physical_devices('GPU')),"
    " 'cuda': tf.test.is_built_with_cuda(), 'nccl': loaded_nccl()}))"
)
_NCCL = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")


def examine(code_hash: str) -> Examined:
    """Returns whether the installed packages fit together.

    Args:
      code_hash: of tfbig's own files.
    """
    found = Examined(facts=dict(installed_versions()) | {"tfbig's code": code_hash})
    try:
        tensorflow = find_tensorflow()
        check_installed()
    except UserError as error:
        found.add("versions", "problem", str(error))
        return found
    record = installed_record() or {}
    horovod = metadata.version("horovod")
    found.facts |= {"tensorflow": str(tensorflow), "Horovod's build": str(record.get("key"))}
    found.add(
        "versions",
        "fine",
        f"Python {found.facts['python']}, {tensorflow}, Keras {found.facts.get('keras')}, "
        f"Horovod {horovod} of this tfbig",
    )
    return found


def uses_nccl() -> bool:
    """Returns whether the installed Horovod was built with NCCL."""
    options = (installed_record() or {}).get("options", {})
    return options.get("HOROVOD_GPU_OPERATIONS") == "NCCL"


def loaded_nccl(maps: Path = Path("/proc/self/maps")) -> str:
    """Returns the version of the NCCL that this process has loaded, "" where it has none.

    Asks the library itself, as another one than the package's may come first on the loader's path.

    Args:
      maps: of the process' memory, which names its libraries.
    """
    for line in maps.read_text().splitlines():
        path = line.split(maxsplit=5)[5:]
        if not path or not Path(path[0]).name.startswith("libnccl.so"):
            continue
        number = ctypes.c_int()
        try:
            if ctypes.CDLL(path[0]).ncclGetVersion(ctypes.byref(number)) == 0:
                return _nccl_version(number.value)
        except (OSError, AttributeError):  # removed meanwhile, or no NCCL but for its name
            continue
    return ""


def _nccl_version(number: int) -> str:
    """Returns NCCL's number (nccl.h, NCCL_VERSION) as it is written.

    >>> _nccl_version(22703), _nccl_version(2804)
    ('2.27.3', '2.8.4')
    """
    major = 10000 if number >= 10000 else 1000
    return f"{number // major}.{number % major // 100}.{number % 100}"


def examine_nccl(loaded: str) -> Examined:
    """Returns which NCCL the ranks use, a fact that all of them must share.

    Args:
      loaded: version of `loaded_nccl`, by a process that has imported Horovod.
    """
    found, packages = Examined(), []
    for name in _NCCL:
        try:
            packages.append(metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
    if loaded or packages:
        found.facts["NCCL"] = loaded or packages[0]
    if loaded and packages and loaded not in packages:
        text = f"NCCL {loaded} is loaded, the package that is installed has {', '.join(packages)}"
        found.add("versions", "warning", text, "take the other one out of LD_LIBRARY_PATH")
    elif loaded:
        found.add("versions", "fine", f"Horovod has loaded NCCL {loaded}")
    elif packages:
        text = f"NCCL {', '.join(packages)} is installed; Horovod has loaded none"
        found.add("versions", "fine", text)
    return found


def probe(environ: Mapping[str, str] = os.environ) -> tuple[Examined, dict[str, Any]]:
    """Imports TensorFlow and Horovod in another process, so that a crash ends that alone.

    Args:
      environ: of that process.

    Returns:
      Findings, and {"gpus": that TensorFlow sees, "cuda": whether it was built with it, "nccl":
      version that was loaded}.
    """
    found, seen = Examined(), dict[str, Any]()
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **environ}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        found.add(
            "versions",
            "problem",
            f"importing TensorFlow and Horovod took more than {_PROBE_SECONDS:.0f} s",
            "look at this host's load and at the disk that Python's packages lie on",
        )
        return found, seen
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1]
        found.add(
            "versions",
            "problem",
            f"TensorFlow and Horovod do not load: {last}",
            "run python -m tfbig.install_horovod --rebuild",
        )
        return found, seen
    seen = json.loads(done.stdout.strip().splitlines()[-1])
    found.add("versions", "fine", "TensorFlow and Horovod load together")
    return found, seen
