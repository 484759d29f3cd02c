"""Whether all ranks run the same configuration and the same code."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tfbig.config import Config
from tfbig.errors import UserError
from tfbig.together import on_every_rank

PACKAGES = ("tfbig", "trainers", "data_pipeline")
# What may differ between hosts.
LOCAL_FIELDS = ("num_threads",)


def fingerprint(config: Config) -> dict[str, int]:
    """Returns a 63-bit hash of each field of the configuration, by flag, and of the code."""
    hashes = {}
    for section in dataclasses.asdict(config).values():
        for name, value in section.items():
            if name not in LOCAL_FIELDS:
                hashes[f"--{name}"] = _hash(json.dumps(value, sort_keys=True).encode())
    hashes["the installed code"] = code_hash(Path(__file__).parents[1])
    return hashes


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little") >> 1


def code_hash(root: Path) -> int:
    """Returns a 63-bit hash of tfbig's own files below a folder."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    return _hash(digest.digest())


@on_every_rank()
def check_equal_ranks(differs: Callable[[np.ndarray], np.ndarray], config: Config) -> None:
    """Compares configuration and code over all ranks.

    Args:
      differs: returns where an int64 vector (n,) isn't the same on all ranks, equal on every rank.
      config: of this rank.

    Raises:
      UserError: on every rank, naming the fields that differ.
    """
    hashes = fingerprint(config)
    found = differs(np.array(list(hashes.values()), np.int64))
    if found.any():
        names = [name for name, differing in zip(hashes, found, strict=True) if differing]
        raise UserError(
            f"the ranks differ in {', '.join(names)}: start all of them with the same flags and"
            " the same code."
        )
