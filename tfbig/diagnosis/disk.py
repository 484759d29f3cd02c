"""Room and speed of the disks that a run writes to and reads from; /dev/shm. TensorFlow-free."""

import os
import shutil
import tempfile
import time
from pathlib import Path

from tfbig.checkpoint import nearest_folder
from tfbig.config import RunConfig
from tfbig.diagnosis.finding import Examined
from tfbig.presets import preset
from tfbig.shared_memory import ADVICE, FOLDER, NEEDED_BYTES
from tfbig.variables import checkpoint_bytes

_GIB, _MIB = 1 << 30, 1 << 20
_SLOW = 50.0  # MiB/s


def examine(run_dir: str, preset_name: str, megabytes: int) -> Examined:
    """Writes a file where the run folder will be, and looks at the room that is left.

    Args:
      run_dir: the run's folder; it is not made.
      preset_name: of the model, "" for none.
      megabytes: of the file, which is removed.

    Raises:
      UserError: no such preset.
    """
    found, folder = Examined(), nearest_folder(run_dir)
    size = checkpoint_bytes(preset(preset_name)) if preset_name else 0
    # As many as are kept, and the next one while it is written.
    needed = max(_GIB, (RunConfig.keep_last + 1) * size)
    usage = shutil.disk_usage(folder)
    text = f"{usage.free / _GIB:.1f} GiB free at {folder}"
    if usage.free < needed:
        found.add(
            "disk",
            "problem",
            f"{text}, the run's checkpoints need {needed / _GIB:.1f} GiB",
            "free some, or choose another run_dir",
        )
    else:
        found.add("disk", "fine", text)
    try:
        write, read = speed(folder, megabytes)
    except OSError as error:
        text = f"{folder} cannot be written: {error.strerror}"
        found.add("disk", "problem", text, "choose another run_dir, or change its rights")
        return found
    text = f"{folder}: writes {write:.0f} MiB/s, reads {read:.0f} MiB/s"
    if size:
        text += f"; a checkpoint of {size / _GIB:.1f} GiB takes {size / _MIB / write:.0f} s"
    slow = min(write, read) < _SLOW
    advice = "take a faster disk for the run's folder" if slow else ""
    found.add("disk", "warning" if slow else "fine", text, advice)
    return found


def speed(folder: Path, megabytes: int) -> tuple[float, float]:
    """Returns MiB/s of writing a file, fsync included, and of reading it from the disk."""
    block = os.urandom(_MIB)
    # A name of its own: processes of two containers may have one number and share the folder.
    descriptor, name = tempfile.mkstemp(prefix=".tfbig-doctor-", dir=folder)
    try:
        start = time.monotonic()
        for _ in range(megabytes):
            os.write(descriptor, block)
        os.fsync(descriptor)
        written = time.monotonic()
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # or memory would answer
        os.lseek(descriptor, 0, os.SEEK_SET)
        again = time.monotonic()
        while os.read(descriptor, _MIB):
            pass
        read = time.monotonic()
    finally:
        os.close(descriptor)
        os.unlink(name)
    return megabytes / max(written - start, 1e-9), megabytes / max(read - again, 1e-9)


def examine_shared_memory(local_size: int, has_gpus: bool, folder: Path = FOLDER) -> Examined:
    """Returns whether /dev/shm holds what NCCL puts there for the ranks of one host.

    Args:
      local_size: ranks of this host.
      has_gpus: whether NCCL will be used.
      folder: where it is.
    """
    found = Examined()
    if not folder.is_dir():
        found.add("disk", "warning", f"there is no {folder}", "mount a tmpfs there")
        return found
    size = shutil.disk_usage(folder).total
    text = f"{folder} has {size / _GIB:.2g} GiB"
    if size >= NEEDED_BYTES:
        found.add("disk", "fine", text)
        return found
    needed = has_gpus and local_size > 1
    found.add("disk", "problem" if needed else "warning", f"{text}; NCCL needs 1", ADVICE)
    return found
