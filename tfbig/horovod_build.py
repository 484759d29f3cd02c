"""What a build of Horovod depends on, and whether the installed one still fits. TensorFlow-free."""

import dataclasses
import hashlib
import json
import os
import platform
import re
import sysconfig
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from tfbig.errors import UserError
from tfbig.horovod_edits import BUILD_RECORD, edits_sha256

HOROVOD_VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
INSTALL_COMMAND = "python -m tfbig.install_horovod"

# The distributions that provide `import tensorflow`.
_TENSORFLOW_DISTRIBUTIONS = ("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tf-nightly")

# Environment variables that Horovod's setup.py and CMake files read, and the compilers' own. Those
# that steer a running Horovod (HOROVOD_FUSION_THRESHOLD, HOROVOD_RANK, ...) are none of the build.
_BUILD_OPTION = re.compile(
    r"HOROVOD_(WITH|WITHOUT)_\w+|HOROVOD_GPU\w*|HOROVOD_(CUDA|ROCM|NCCL|NVTX)_\w+"
    r"|HOROVOD_BUILD_\w+|HOROVOD_CPU_OPERATIONS|HOROVOD_ALLOW_MIXED_GPU_IMPL|HOROVOD_DEBUG"
    r"|HOROVOD_MPICXX_SHOW|CUDAToolkit_ROOT|CUDACXX|CC|CXX|CFLAGS|CXXFLAGS|LDFLAGS|CCL_\w+"
)


class HorovodUnfit(UserError):
    """Horovod is missing, isn't tfbig's build, or was built for another TensorFlow."""


@dataclasses.dataclass(frozen=True)
class TensorFlowDistribution:
    """An installed TensorFlow.

    Args:
      name: of the distribution, which differs between CPU and GPU builds.
      version: as its metadata has it.
    """

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def find_tensorflow() -> TensorFlowDistribution:
    """Returns the installed TensorFlow, without importing it.

    Raises:
      UserError: there is none, or there are two, of which one has overwritten the other.
    """
    found = []
    for name in _TENSORFLOW_DISTRIBUTIONS:
        try:
            found.append(TensorFlowDistribution(name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    if not found:
        raise UserError(
            "TensorFlow is not installed: run `pip install 'tfbig[cpu]'` or "
            "`pip install 'tfbig[gpu]'` (in a checkout: `pip install -e '.[cpu]'`)"
        )
    if len(found) > 1:
        raise UserError(
            f"{' and '.join(map(str, found))} are both installed and overwrite each other: "
            f"uninstall both, then install one"
        )
    return found[0]


def build_options(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the build's environment variables: TensorFlow and Gloo, plus what the user set.

    Args:
      environ: the process's environment. HOROVOD_WITH_MPI=1 and HOROVOD_GPU_OPERATIONS=NCCL, with
        their companions, pass through.

    Raises:
      UserError: the options leave out TensorFlow or Gloo.
    """
    given = {
        name: value for name, value in environ.items() if value and _BUILD_OPTION.fullmatch(name)
    }
    for needed in ("TENSORFLOW", "GLOO"):
        if given.get(f"HOROVOD_WITHOUT_{needed}"):
            raise UserError(
                f"HOROVOD_WITHOUT_{needed} is set, but tfbig stands on it: unset it and try again"
            )
    options = {"HOROVOD_WITH_TENSORFLOW": "1", "HOROVOD_WITH_GLOO": "1"}
    for optional in ("PYTORCH", "MXNET", "MPI"):
        if f"HOROVOD_WITH_{optional}" not in given:
            options[f"HOROVOD_WITHOUT_{optional}"] = "1"
    return dict(sorted((options | given).items()))


def build_record(
    tensorflow: TensorFlowDistribution, options: Mapping[str, str], edits: str | None = None
) -> dict[str, Any]:
    """Returns everything that a build's binary depends on, and `key`, the digest of it all.

    Args:
      tensorflow: what it is built against.
      options: the build's environment variables.
      edits: the digest of the edits; None means the present ones.

    Returns:
      A dict for json, whose `key` names the wheel's folder in the cache.
    """
    record: dict[str, Any] = {
        "horovod": HOROVOD_VERSION,
        "sdist_sha256": SDIST_SHA256,
        "edits_sha256": edits or edits_sha256(),
        "python": str(sysconfig.get_config_var("SOABI")),
        "platform": sysconfig.get_platform(),
        "libc": " ".join(platform.libc_ver()),
        "tensorflow": tensorflow.name,
        "tensorflow_version": tensorflow.version,
        "options": dict(options),
    }
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    python = "".join(platform.python_version_tuple()[:2])
    return record | {
        "key": f"py{python}-{tensorflow.name}-{tensorflow.version}-{digest[:16]}",
    }


def installed_record() -> dict[str, Any] | None:
    """Returns the record inside the installed Horovod, None where there is no such Horovod."""
    try:
        distribution = metadata.distribution("horovod")
        path = Path(str(distribution.locate_file(f"horovod/{BUILD_RECORD}")))
        record = json.loads(path.read_text(encoding="utf-8"))
    except (metadata.PackageNotFoundError, OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def check_installed() -> None:
    """Checks that the installed Horovod is tfbig's build for the installed TensorFlow.

    Takes milliseconds and imports neither. Trainers that use Horovod call it first: an unpatched
    Horovod drops collectives silently, and one built for another TensorFlow may load all the same.

    Raises:
      HorovodUnfit: it is not; one line with the command to run.
    """
    try:
        version = metadata.version("horovod")
    except metadata.PackageNotFoundError:
        raise HorovodUnfit(f"Horovod is not installed: run `{INSTALL_COMMAND}`") from None
    record = installed_record()
    if record is None:
        raise HorovodUnfit(
            f"the installed Horovod {version} is not tfbig's build, and TensorFlow would drop some "
            f"of its collectives: run `{INSTALL_COMMAND}`"
        )
    if record.get("edits_sha256") != edits_sha256():
        raise HorovodUnfit(
            f"the installed Horovod was built by another version of tfbig: run `{INSTALL_COMMAND}`"
        )
    now = find_tensorflow()
    then = TensorFlowDistribution(
        str(record.get("tensorflow")), str(record.get("tensorflow_version"))
    )
    if now != then:
        raise HorovodUnfit(
            f"Horovod was built for {then}, but {now} is installed: run `{INSTALL_COMMAND}`"
        )


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Returns where wheels are kept: $TFBIG_CACHE, $XDG_CACHE_HOME/tfbig or ~/.cache/tfbig."""
    if environ.get("TFBIG_CACHE"):
        return Path(environ["TFBIG_CACHE"]).expanduser().resolve() / "horovod"
    home = Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return home.resolve() / "tfbig" / "horovod"
