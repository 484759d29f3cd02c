"""Reading a checkpoint: any rectangle of any variable, whoever wrote which part of it."""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from tfbig.checkpoint_format import MANIFEST_NAME, UnreadableCheckpointError
from tfbig.checkpoint_upgrade import upgraded
from tfbig.durable_file import FileDigest, digest_problem
from tfbig.errors import near_matches
from tfbig.rectangle import Rectangle, bounds_problem, intersect
from tfbig.safetensors_file import StoredTensor, dtype_of, read_header, read_rectangle

_WHAT_TO_DO = "resume from an earlier checkpoint, or restore the file"
_VERIFY_THREADS = 4


class CheckpointReader:
    """One complete checkpoint.

    Opening it reads the manifest only. No file stays open between calls.

    Args:
        directory: a step's directory.
        checks_digests: whether a file's sha256 is compared with the manifest's before anything is
            read from it. Leave it out where `verify` was called.

    Raises:
        UnreadableCheckpointError: when it has no manifest, a damaged one, or one of a format
            that this version does not know.

    Example:
        >>> reader = CheckpointReader("run/checkpoints/step_00001000")
        >>> kernel = reader.read("dense/kernel", start=(0, 128), shape=(64, 128))
    """

    def __init__(self, directory: str | os.PathLike[str], checks_digests: bool = False) -> None:
        self.directory = Path(directory)
        self._checks_digests = checks_digests
        self._checked: set[str] = set()
        self.manifest: dict[str, Any] = _read_manifest(self.directory)
        self._variables: dict[str, Any] = self.manifest["variables"]
        self._headers: dict[str, dict[str, StoredTensor]] = {}

    @property
    def step(self) -> int:
        """Optimizer updates made when it was saved."""
        return self.manifest["step"]

    def paths(self) -> list[str]:
        """Returns the canonical paths of all variables, sorted."""
        return sorted(self._variables)

    def has(self, path: str) -> bool:
        """Says whether it holds a variable.

        Args:
            path: a canonical path.
        """
        return path in self._variables

    def shape(self, path: str) -> tuple[int, ...]:
        """Returns a variable's whole shape.

        Args:
            path: a canonical path.
        """
        return tuple(self._variable(path)["shape"])

    def dtype(self, path: str) -> np.dtype:
        """Returns the dtype a variable is stored in.

        Args:
            path: a canonical path.
        """
        return dtype_of(self._variable(path)["dtype"])

    def read(
        self, path: str, start: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> np.ndarray:
        """Reads a rectangle of a variable, and only the slices it meets.

        Memory: the rectangle, and at most one slice's share of it or 32 MiB besides.

        Args:
            path: the variable's canonical path.
            start: first index in every dim; the origin when left out.
            shape: extent in every dim; all that follows `start` when left out.

        Returns:
            A new array, of the stored dtype.

        Raises:
            UnreadableCheckpointError: when there is no such variable, or a file is damaged.
            ValueError: when the rectangle is not within the variable.
        """
        whole = self.shape(path)
        start = tuple(start) if start is not None else (0,) * len(whole)
        if shape is None:
            shape = tuple(size - first for size, first in zip(whole, start, strict=True))
        wanted = Rectangle(start, tuple(shape))
        if problem := bounds_problem(whole, wanted):
            raise ValueError(f"{path}: {problem}")
        out = np.empty(wanted.shape, self.dtype(path))
        num_read = 0
        for stored in self._variable(path)["slices"]:
            source = Rectangle(tuple(stored["start"]), tuple(stored["shape"]))
            if common := intersect(source, wanted):
                # The ellipsis gives a view even of a scalar.
                place: tuple[Any, ...] = (*common.relative_to(start).slices, ...)
                self._read_slice(path, stored, source, common, out[place])
                num_read += common.volume
        if num_read != wanted.volume:
            raise UnreadableCheckpointError(
                f"{self.directory / MANIFEST_NAME} has {num_read} of the {wanted.volume} elements "
                f"{wanted} of {path}; resume from an earlier checkpoint"
            )
        return out

    def problems(self) -> list[str]:
        """Checks the size and sha256 of every file the manifest names, four files at a time.

        Returns:
            One line for each file that is missing or damaged; none when all are intact.
        """
        with ThreadPoolExecutor(_VERIFY_THREADS) as pool:
            found = pool.map(self._problem, sorted(self.manifest["files"]))
            return [problem for problem in found if problem]

    def check_files(self) -> None:
        """Checks that every file is there in its size, without reading it.

        Raises:
            UnreadableCheckpointError: when one is missing or cut.
        """
        for name, entry in sorted(self.manifest["files"].items()):
            try:
                num_bytes = os.stat(self.directory / name).st_size
            except OSError as error:
                raise UnreadableCheckpointError(
                    f"{self.directory / name} cannot be read: {error.strerror}; {_WHAT_TO_DO}"
                ) from error
            if num_bytes != entry["bytes"]:
                raise UnreadableCheckpointError(
                    f"{self.directory / name} has {num_bytes} bytes, its manifest says "
                    f"{entry['bytes']}; {_WHAT_TO_DO}"
                )

    def verify(self) -> None:
        """Checks every file, see `problems`.

        Raises:
            UnreadableCheckpointError: when a file is missing or damaged; it names them all.
        """
        if problems := self.problems():
            raise UnreadableCheckpointError(
                f"{self.directory} is damaged: {'; '.join(problems)}. "
                "Resume from an earlier checkpoint, or restore the files"
            )

    def _problem(self, name: str) -> str | None:
        entry = self.manifest["files"].get(name)
        if entry is None:
            return f"{MANIFEST_NAME} does not list {name}"
        return digest_problem(self.directory / name, FileDigest(entry["sha256"], entry["bytes"]))

    def _variable(self, path: str) -> dict[str, Any]:
        if path not in self._variables:
            raise UnreadableCheckpointError(
                f"{self.directory} has no variable {path}."
                f"{near_matches(path, list(self._variables))}"
            )
        return self._variables[path]

    def _read_slice(
        self,
        path: str,
        stored: dict[str, Any],
        source: Rectangle,
        common: Rectangle,
        out: np.ndarray,
    ) -> None:
        """Fills `out` with the part `common` of the stored slice `source`."""
        file_path = self.directory / stored["file"]
        if self._checks_digests and stored["file"] not in self._checked:
            if problem := self._problem(stored["file"]):
                raise UnreadableCheckpointError(f"{self.directory}: {problem}; {_WHAT_TO_DO}")
            self._checked.add(stored["file"])
        try:
            descriptor = os.open(file_path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if stored["file"] not in self._headers:
                    self._headers[stored["file"]] = read_header(descriptor)
                tensor = self._headers[stored["file"]].get(stored["key"])
                if tensor is None or (tensor.shape, tensor.dtype) != (source.shape, out.dtype):
                    raise ValueError(f"it does not hold {path} as the manifest says")
                read_rectangle(descriptor, tensor, common.relative_to(source.start), out)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise UnreadableCheckpointError(
                f"{file_path} cannot be read: {error.strerror}; {_WHAT_TO_DO}"
            ) from error
        except ValueError as error:
            raise UnreadableCheckpointError(
                f"{file_path} is damaged: {error}; {_WHAT_TO_DO}"
            ) from error


def _read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST_NAME
    try:
        manifest = orjson.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UnreadableCheckpointError(
            f"{directory} is not a complete checkpoint: it has no {MANIFEST_NAME}; "
            f"name a run's checkpoints/step_NNNNNNNN"
        ) from error
    except OSError as error:
        raise UnreadableCheckpointError(
            f"{path} cannot be read: {error.strerror}; {_WHAT_TO_DO}"
        ) from error
    except orjson.JSONDecodeError as error:
        raise UnreadableCheckpointError(f"{path} is damaged: not JSON; {_WHAT_TO_DO}") from error
    if not isinstance(manifest, dict) or "variables" not in manifest:
        raise UnreadableCheckpointError(
            f"{path} is not a checkpoint's, but a data folder's or another program's; name a run's "
            "checkpoints/step_NNNNNNNN"
        )
    manifest = upgraded(manifest, path)
    if missing := _missing_fields(manifest, ("step", "files", "variables")):
        raise UnreadableCheckpointError(f"{path} is damaged: no {missing}; {_WHAT_TO_DO}")
    return manifest


def _missing_fields(manifest: dict[str, Any], names: Iterable[str]) -> str:
    return ", ".join(name for name in names if name not in manifest)
