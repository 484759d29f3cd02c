"""Versions of Python, TensorFlow, Horovod and tfbig itself. TensorFlow-free."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from tfbig.diagnosis.finding import Examined
from tfbig.errors import UserError
from tfbig.horovod_build import check_installed, find_tensorflow, installed_record
from tfbig.run_folder import installed_versions

_PROBE_SECONDS = 240.0
# Imports what training does and says which GPUs TensorFlow sees; no device is touched.
_PROBE = (
    "import json, trainers.collectives, tensorflow as tf; "
    "print(json.dumps({'gpus': len(tf.config.list_physical_devices('GPU')),"
    " 'cuda': tf.test.is_built_with_cuda()}))"
)
_NCCL = "nvidia-nccl-cu12"


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
    try:
        found.facts["NCCL"] = metadata.version(_NCCL)
    except metadata.PackageNotFoundError:
        pass
    return found


def uses_nccl() -> bool:
    """Returns whether the installed Horovod was built with NCCL."""
    options = (installed_record() or {}).get("options", {})
    return options.get("HOROVOD_GPU_OPERATIONS") == "NCCL"


def probe(environ: Mapping[str, str] = os.environ) -> tuple[Examined, dict[str, Any]]:
    """Imports TensorFlow and Horovod in another process, so that a crash ends that alone.

    Args:
      environ: of that process.

    Returns:
      Findings, and {"gpus": that TensorFlow sees, "cuda": whether it was built with it}.
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
