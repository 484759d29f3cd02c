"""Manifests of older checkpoint formats, made into today's. TensorFlow-free.

A change of the format raises FORMAT_VERSION and adds the function that turns a manifest of the
version before into the new one; files stay as they are. Fields of the run's configuration that came
later need none: see run_state.ADDED_SINCE.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tfbig.checkpoint_format import FORMAT_VERSION, UnreadableCheckpointError

Manifest = dict[str, Any]
Upgrade = Callable[[Manifest], Manifest]

# By the version that a function takes; it returns a manifest of the next version.
UPGRADES: Mapping[int, Upgrade] = {}


def upgraded(
    manifest: Manifest,
    path: Path,
    upgrades: Mapping[int, Upgrade] = UPGRADES,
    newest: int = FORMAT_VERSION,
) -> Manifest:
    """Returns a manifest in the newest format.

    Args:
      manifest: as a file has it.
      path: of the file.
      upgrades: by the version that each takes.
      newest: format version.

    Raises:
      UnreadableCheckpointError: its format is newer, or older than any upgrade takes.
    """
    version = manifest.get("format_version")
    oldest = newest
    while oldest - 1 in upgrades:
        oldest -= 1
    if not isinstance(version, int) or not oldest <= version <= newest:
        known = f"{newest}" if oldest == newest else f"{oldest} to {newest}"
        raise UnreadableCheckpointError(
            f"{path} has format_version {version}, this tfbig reads {known}; "
            "use the version of tfbig that wrote it"
        )
    for number in range(version, newest):
        manifest = upgrades[number](manifest) | {"format_version": number + 1}
    return manifest
