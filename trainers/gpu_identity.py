"""Which physical GPU a process drives, and that no two ranks drive the same one. TensorFlow-free.

A launcher may show each process all GPUs of its host, or its own one alone, which then has number 0
in every process: only the GPU's own identity tells two of them apart.
"""

import ctypes
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfbig.errors import UserError
from tfbig.together import on_every_rank

_UUID_BYTES = 16


def gpu_uuid(number: int) -> bytes:
    """Returns the identity of a GPU by the number that this process sees it under; b"" for -1.

    Asks CUDA's driver, which CUDA_VISIBLE_DEVICES narrows as it does TensorFlow
    (docs.nvidia.com, CUDA driver API, cuDeviceGetUuid_v2, of a MIG slice its own).
    """
    if number < 0:
        return b""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        device, uuid = ctypes.c_int(), (ctypes.c_ubyte * _UUID_BYTES)()
        if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), number):
            return b""
        if cuda.cuDeviceGetUuid_v2(ctypes.byref(uuid), device):
            return b""
    except (OSError, AttributeError):  # no driver, or an old one
        return b""
    return bytes(uuid)


@on_every_rank()
def check_own_gpus(ranks: Any, uuids: Sequence[bytes]) -> None:
    """Checks that no two ranks of a host drive one GPU: NCCL would hang; all ranks call it.

    Args:
      ranks: a trainer or an engine; its `agree` and `gather` are used.
      uuids: of this rank's GPUs; b"" for one that cannot be told.

    Raises:
      SharedError: on every rank, naming two that share one.
    """
    most = ranks.agree(len(uuids), "max")
    if not most:
        return
    own = [_number(uuid) for uuid in uuids] + [-1] * (most - len(uuids))
    seen = ranks.gather(np.array(own, np.int64)).reshape([-1, most]).tolist()  # (ranks, most)
    holder: dict[int, int] = {}
    for rank, values in enumerate(seen):
        for value in values:
            if value >= 0 and holder.setdefault(value, rank) < rank:
                raise UserError(
                    f"ranks {holder[value]} and {rank} drive the same GPU, on which NCCL would "
                    "hang: start one rank a GPU, or set CUDA_VISIBLE_DEVICES for each rank."
                )


def _number(uuid: bytes) -> int:
    return int.from_bytes(hashlib.sha256(uuid).digest()[:8], "little") >> 1 if uuid else -1
