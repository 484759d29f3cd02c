"""Names of the profiler's files: smdebug's where it has them, ours beside. TensorFlow-free.

profiler-output/
  system/incremental/<YYYYMMDDHH>/<epoch seconds>.algo-1.json   samples, a file a minute and host
  framework/pevents/<YYYYMMDDHH>/<end us>_<pid>-<host>_pythontimeline.json    events (Chrome)
  framework/tensorflow/detailed_profiling/<YYYYMMDDHH>/<step>/rank-00000/     XPlane captures
  minutes/algo-1.jsonl      the samples' quantiles, a line a minute
  hosts/algo-1.json         cores, memory, GPUs of a host
  steps/rank-00000.bin      a row a step; rank-00000.json names its columns
  captures/rank-00000.jsonl what a capture says of its step: split and operators
  tensors/rank-00000.jsonl  statistics of weights and gradients
"""

import time
from pathlib import Path


def hour_of(seconds: float) -> str:
    """Returns the folder name of a time, in UTC.

    >>> hour_of(0)
    '1970010100'
    """
    return time.strftime("%Y%m%d%H", time.gmtime(seconds))


def system_path(profiler_dir: Path, node_id: str, minute: int) -> Path:
    """Returns the file of one host's samples of one minute.

    Args:
      profiler_dir: of the run.
      node_id: algo-1, ...
      minute: seconds since 1970 at which it began.
    """
    return profiler_dir / "system/incremental" / hour_of(minute) / f"{minute}.{node_id}.json"


def events_dir(profiler_dir: Path) -> Path:
    """Returns the folder of the event files."""
    return profiler_dir / "framework/pevents"


def capture_dir(profiler_dir: Path, step: int, rank: int, seconds: float) -> Path:
    """Returns the folder of one rank's XPlane capture that begins with a step."""
    folder = profiler_dir / "framework/tensorflow/detailed_profiling" / hour_of(seconds)
    return folder / f"{step:09d}" / f"rank-{rank:05d}"


def minutes_path(profiler_dir: Path, node_id: str) -> Path:
    """Returns the file of one host's quantiles by minute."""
    return profiler_dir / "minutes" / f"{node_id}.jsonl"


def host_path(profiler_dir: Path, node_id: str) -> Path:
    """Returns the file that describes one host."""
    return profiler_dir / "hosts" / f"{node_id}.json"


def rank_path(profiler_dir: Path, kind: str, rank: int, suffix: str) -> Path:
    """Returns one rank's file of a kind: steps, captures or tensors."""
    return profiler_dir / kind / f"rank-{rank:05d}{suffix}"
