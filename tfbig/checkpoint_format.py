"""What a checkpoint is made of: names, slices of variables, and the manifest's fields.

checkpoints/step_00001000/
part-00000.safetensors    slices of variables, written by one rank
part-00000.json           that part's digest and slices; only while the save is under way
manifest.json             written last: a directory without it doesn't exist
"""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tfbig.errors import RunError, UserError
from tfbig.rectangle import Rectangle
from tfbig.safetensors_file import dtype_of

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
_STEP_DIRECTORY = re.compile(r"step_(\d{8,})")
_OUR_FILE = re.compile(r"(?:part-(\d{5,})\.(?:safetensors|json)|manifest\.json)(?:\.tmp-\d+)?")


class CheckpointError(RunError):
    """A checkpoint could not be saved; what was saved before it is intact."""


class UnreadableCheckpointError(UserError):
    """A checkpoint is damaged, incomplete or unknown; another can be chosen."""


class LazyArray:
    """An array that is made when it is written, such as a copy from a device.

    Args:
        shape: its shape.
        dtype: its dtype, or the name of it.
        load: returns its values as they are now and stay, as a numpy array or anything that
            numpy.asarray takes, such as a tensor.
    """

    def __init__(self, shape: Iterable[int], dtype: Any, load: Callable[[], Any]) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self._load = load

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._load(), dtype)


class Slice(NamedTuple):
    """A rectangle of a variable that a rank holds.

    Args:
        path: the variable's canonical path, `transformer_blocks/17/att/qkv/kernel`.
        global_shape: the whole variable's shape, the model's and no layout's.
        start: the rectangle's first index in every dim.
        array: its contents: an array, a tensor, a variable, a LazyArray. It must have shape and
            dtype, or be small (a number); it is turned into a numpy array when it is written.
        is_writer: whether this rank writes it; False on ranks that hold a replica.
    """

    path: str
    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    array: Any
    is_writer: bool

    @property
    def rectangle(self) -> Rectangle:
        """Where the slice stands in the variable."""
        shape = self.array.shape if hasattr(self.array, "shape") else np.shape(self.array)
        return Rectangle(tuple(map(int, self.start)), tuple(map(int, shape)))

    @property
    def dtype(self) -> np.dtype:
        """The numpy dtype it is stored in."""
        dtype = getattr(self.array, "dtype", None)
        if dtype is None:
            return np.asarray(self.array).dtype
        dtype = getattr(dtype, "as_numpy_dtype", dtype)  # of a tf.DType
        return dtype_of(dtype if isinstance(dtype, str) else np.dtype(dtype).name)


@dataclass(frozen=True)
class RunState:
    """What a manifest says of the run besides its variables; JSON values only.

    Args:
        consumed_samples: samples of the stream that were consumed before this step.
        seeds: by purpose.
        loss_scale: of float16 training, or None.
        config: the resolved configuration, by section.
        tokenizer_sha256: of tokenizer.json, or None.
        data: the data's identity.
        metadata: what else describes the checkpoint; `eval_loss` is what keep_best compares.
    """

    consumed_samples: int = 0
    seeds: dict[str, int] = field(default_factory=dict)
    loss_scale: float | None = None
    config: dict[str, Any] = field(default_factory=dict)
    tokenizer_sha256: str | None = None
    data: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)


def num_bytes_to_write(slices: Iterable[Slice]) -> int:
    """Returns the bytes a save of these slices takes on disk, headers not counted.

    Args:
        slices: a rank's slices; no array is loaded.
    """
    return sum(
        math.prod(part.rectangle.shape) * part.dtype.itemsize for part in slices if part.is_writer
    )


def step_directory_name(step: int) -> str:
    """Returns the name of a step's directory.

    >>> step_directory_name(1000)
    'step_00001000'
    """
    assert step >= 0, f"step {step} is negative"
    return f"step_{step:08d}"


def step_of_directory(name: str) -> int | None:
    """Returns the step that a directory's name stands for, or None for another directory.

    >>> step_of_directory("step_00001000")
    1000
    """
    match = _STEP_DIRECTORY.fullmatch(name)
    return int(match[1]) if match and step_directory_name(int(match[1])) == name else None


def our_files(directory: Path) -> dict[str, int | None]:
    """Returns the files of a checkpoint's directory that tfbig wrote, leftovers included.

    Args:
        directory: a step's directory.

    Returns:
        By name, the number of the part that each belongs to; None for the manifest.
    """
    files = {}
    for entry in directory.iterdir():
        if match := _OUR_FILE.fullmatch(entry.name):
            files[entry.name] = int(match[1]) if match[1] else None
    return files
