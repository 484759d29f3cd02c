"""Where a rank's run stands, in memory that outlives the process's image. TensorFlow-free.

A rank that changes its world begins anew by exec(2); what it holds then lies in two files of
memfd_create(2), which have no name, stay with the process and go with it.
"""

import os
from collections.abc import Iterable, MutableMapping
from dataclasses import asdict, dataclass, field

import numpy as np
import orjson

from tfbig.checkpoint_format import Slice
from tfbig.durable_file import write_all
from tfbig.rectangle import Rectangle
from tfbig.safetensors_file import TensorToWrite, read_header, read_rectangle, write_open

_VARIABLE = "TFBIG_ELASTIC"  # the numbers of both files


@dataclass(kw_only=True)
class Standing:
    """What a rank knows of a run, and takes from one world into the next; all of it is JSON."""

    num_worlds: int = 0
    """Worlds that this process has left."""
    num_fruitless: int = 0
    """The last of them in which no step was made."""
    world_size: int = 0
    """Ranks of the last one."""
    reason: str = ""
    """Why it was left."""
    left_at: float = 0.0
    """When, in seconds since 1970."""
    microbatch_rows: int = 0
    """Sequences of one forward pass, which all worlds keep."""
    has_folder: bool = False
    """Whether this job has made or taken the run's folder."""
    step: int = -1
    """Optimizer updates of the state that is held; -1 without one."""
    consumed_samples: int = 0
    """Of the same."""
    owes_pause: bool = False
    """Whether the step's evaluation or checkpoint is due."""
    is_stopping: bool = False
    """Whether a signal has told this rank to save and end."""
    recent_losses: list = field(default_factory=list)
    """For judging the next ones."""
    records: list = field(default_factory=list)
    """Of the newest steps, as for metrics.jsonl."""


def keep(standing: Standing, slices: Iterable[Slice], environ: MutableMapping[str, str]) -> None:
    """Writes a standing and the state that belongs to it, for `take` after the exec.

    Args:
      standing: of this rank.
      slices: whole variables; none where no state is held.
      environ: is given the files' numbers.
    """
    tensors = [TensorToWrite(s.path, s.dtype, s.global_shape, s.array) for s in slices]
    assert bool(tensors) == (standing.step >= 0)
    text, state = (os.memfd_create(f"tfbig_{name}") for name in ("standing", "state"))
    write_all(text, orjson.dumps(asdict(standing), option=orjson.OPT_SERIALIZE_NUMPY))
    write_open(state, tensors, {})
    environ[_VARIABLE] = f"{text},{state}"


def rewrite(standing: Standing, environ: MutableMapping[str, str]) -> None:
    """Replaces the standing that was kept, and leaves the state as it is."""
    text, _ = kept_files(environ)
    os.ftruncate(text, 0)
    os.lseek(text, 0, os.SEEK_SET)
    write_all(text, orjson.dumps(asdict(standing), option=orjson.OPT_SERIALIZE_NUMPY))


def kept_files(environ: MutableMapping[str, str]) -> list[int]:
    """Returns the numbers of the files that `keep` wrote, or `take` read."""
    return [int(number) for number in environ.get(_VARIABLE, "").split(",") if number]


class Kept:
    """What `keep` wrote.

    Attributes:
      standing: as it was.
      shapes: of the variables, by path: (shape, name of the dtype).
    """

    def __init__(self, text: int, state: int) -> None:
        size = os.fstat(text).st_size
        self.standing = Standing(**orjson.loads(os.pread(text, size, 0)))
        self._state = state
        self._tensors = read_header(state)
        self.shapes = {
            path: (list(tensor.shape), tensor.dtype.name) for path, tensor in self._tensors.items()
        }

    def read(self, path: str) -> np.ndarray:
        """Returns a variable's values."""
        tensor = self._tensors[path]
        out = np.empty(tensor.shape, tensor.dtype)
        whole = Rectangle((0,) * len(tensor.shape), tuple(tensor.shape))
        read_rectangle(self._state, tensor, whole, out)
        return out


def take(environ: MutableMapping[str, str]) -> Kept | None:
    """Returns what this process kept before its exec; None in one that has just been started."""
    files = kept_files(environ)
    return Kept(*files) if files else None


def let_go(environ: MutableMapping[str, str]) -> None:
    """Frees the memory of what was kept."""
    for number in kept_files(environ):
        os.close(number)
    environ.pop(_VARIABLE, None)
