"""/dev/shm, by which NCCL joins a host's GPUs that no link joins. TensorFlow-free."""

import shutil
from pathlib import Path

NEEDED_BYTES = 1 << 30  # what NCCL may take of it (NVIDIA/nccl issue 290)
FOLDER = Path("/dev/shm")
ADVICE = "docker run --shm-size=8g; Kubernetes: an emptyDir of medium Memory at /dev/shm"


def shared_memory_warning(num_gpus: int, folder: Path = FOLDER) -> str | None:
    """Says that NCCL may find no room, in one line; None where it has enough or isn't used.

    No refusal: GPUs that NVLink joins hardly use it.

    Args:
      num_gpus: of one host that a run drives.
      folder: where it is.
    """
    if num_gpus < 2:
        return None
    size = shutil.disk_usage(folder).total if folder.is_dir() else 0
    if size >= NEEDED_BYTES:
        return None
    return (
        f"{folder} has {size >> 20} MiB for {num_gpus} GPUs; NCCL may need {NEEDED_BYTES >> 20}, "
        f"and fails where it is full: {ADVICE}"
    )
