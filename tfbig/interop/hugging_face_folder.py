"""A Hugging Face folder read as a checkpoint of ours, slice by slice. TensorFlow-free."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from tfbig.checkpoint_format import UnreadableCheckpointError
from tfbig.config import ModelConfig
from tfbig.errors import UserError, near_matches
from tfbig.interop.architecture import Architecture
from tfbig.interop.gpt2 import GPT2
from tfbig.interop.gpt_neox import GPT_NEOX
from tfbig.interop.tensor_view import TensorView
from tfbig.rectangle import Rectangle, bounds_problem
from tfbig.safetensors_file import StoredTensor, read_header, read_rectangle

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
ARCHITECTURES = (GPT2, GPT_NEOX)


def is_hugging_face_folder(path: str | os.PathLike[str]) -> bool:
    """Returns whether `path` is a model as transformers saves it, whatever its architecture."""
    config = Path(path) / CONFIG
    return config.is_file() and "model_type" in _read_json(config)


def refuse_pickle(path: str | os.PathLike[str]) -> None:
    """Checks that no pickled weights are asked for.

    Args:
      path: a file or a folder.

    Raises:
      UserError: it is a pickle, or a folder that holds weights in no other form.
    """
    path = Path(path)
    if path.is_file() and path.suffix in PICKLES:
        raise UserError(f"{path} is {_why_not_pickle()}")
    if path.is_dir() and not list(path.glob("*.safetensors")):
        pickles = sorted(file.name for file in path.iterdir() if file.suffix in PICKLES)
        if pickles:
            raise UserError(f"{path} holds its weights in {pickles[0]}, {_why_not_pickle()}")


def _why_not_pickle() -> str:
    return (
        "a pickle, which can run any code when it is read: convert it where you trust it, with "
        "transformers' save_pretrained, and name the folder with model.safetensors."
    )


class HuggingFaceFolder:
    """GPT-2 or GPT-NeoX/Pythia as transformers saves it, with our paths and shapes.

    Opening it reads config.json and the files' headers only. Weights come as float32, whatever
    they are stored in; only the rectangle that is asked for is read.

    Args:
      directory: holds config.json and model.safetensors, or the index of several files.

    Raises:
      UserError: another architecture, an option that we have no counterpart for, pickled weights,
        or tensors that are missing or superfluous.

    Attributes:
      directory: the folder.
      model: the model that it describes.

    Example:
      >>> folder = HuggingFaceFolder("pythia-70m")
      >>> rows = folder.read("embedding_layer/token_emb/embeddings", (0, 0), (128, 512))
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        refuse_pickle(directory)
        self._config = _read_json(self.directory / CONFIG)
        self._architecture = _architecture_of(self._config, self.directory)
        try:
            self.model = ModelConfig(**self._architecture.read_fields(self._config))
        except UserError as error:
            raise UserError(f"{self.directory / CONFIG}: {error}") from None
        except (TypeError, ValueError) as error:
            raise UserError(f"{self.directory / CONFIG} is damaged: {error}") from None
        self._stored = _read_headers(self.directory)
        self._views = self._find_tensors()

    def model_fields(self) -> dict[str, Any]:
        """Returns the model's fields as flags give them."""
        return dataclasses.asdict(self.model)

    def paths(self) -> list[str]:
        """Returns the canonical paths of all variables, sorted."""
        return sorted(self._views)

    def has(self, path: str) -> bool:
        """Returns whether it holds a variable."""
        return path in self._views

    def shape(self, path: str) -> tuple[int, ...]:
        """Returns a variable's whole shape."""
        return self._view(path).shape

    def read(
        self, path: str, start: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> np.ndarray:
        """Returns a rectangle of a variable, float32; reads no more than it of the file.

        Args:
          path: the variable's canonical path.
          start: first index in every dim; the origin when left out.
          shape: extent in every dim; all that follows `start` when left out.

        Raises:
          UnreadableCheckpointError: there is no such variable, or a file is damaged.
          ValueError: the rectangle is not within the variable.
        """
        view = self._view(path)
        start = tuple(start) if start is not None else (0,) * len(view.shape)
        if shape is None:
            shape = tuple(size - first for size, first in zip(view.shape, start, strict=True))
        wanted = Rectangle(start, tuple(shape))
        if problem := bounds_problem(view.shape, wanted):
            raise ValueError(f"{path}: {problem}")
        if not view.name:  # a bias that the architecture can do without
            return np.zeros(wanted.shape, np.float32)
        value = np.array(self._read_view(view, wanted), np.float32, order="C")
        return self._scaled(path, value, wanted)

    def _view(self, path: str) -> TensorView:
        if path not in self._views:
            raise UnreadableCheckpointError(
                f"{self.directory} has no variable {path}.{near_matches(path, list(self._views))}"
            )
        return self._views[path]

    def _read_view(self, view: TensorView, wanted: Rectangle) -> np.ndarray:
        file_path, tensor = self._stored[view.name]
        grouped = tensor._replace(shape=view.grouped_shape)
        rectangle = view.stored_rectangle(wanted)
        out = np.empty(rectangle.shape, tensor.dtype)
        try:
            descriptor = os.open(file_path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                read_rectangle(descriptor, grouped, rectangle, out)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise UnreadableCheckpointError(
                f"{file_path} cannot be read: {error.strerror}"
            ) from error
        except ValueError as error:
            raise UnreadableCheckpointError(f"{file_path} is damaged: {error}") from error
        return view.from_grouped(out)

    def _scaled(self, path: str, value: np.ndarray, wanted: Rectangle) -> np.ndarray:
        """Returns the value with the architecture's own scale of scores put into the queries."""
        if "/att/qkv/" not in path:
            return value
        scale = self._architecture.query_scale(self._config, int(path.split("/")[1]))
        dim = 1 if path.endswith("kernel") else 0  # of (D, 3, H, d) or (3, H, d)
        if scale != 1.0 and wanted.start[dim] == 0 and wanted.shape[dim] > 0:
            queries = (slice(None),) * dim + (0,)
            value[queries] *= np.float32(scale)
        return value

    def _find_tensors(self) -> dict[str, TensorView]:
        """Returns the view of each of our variables, with the tensor's name in this folder.

        Raises:
          UserError: a tensor is missing, of another shape, or has no place in the model.
        """
        architecture = self._architecture
        found: dict[str, TensorView] = {}
        for path, view in architecture.views(self.model).items():
            name = self._name_of(view.name)
            if name is None and "/att/" in path and path.endswith("/bias"):
                if not architecture.has_attention_bias(self._config):
                    found[path] = view._replace(name="")
                    continue
            if name is None:
                raise UserError(f"{self.directory} lacks the tensor {view.name}.")
            stored = self._stored[name][1]
            if stored.shape != view.stored_shape:
                raise UserError(
                    f"{self.directory}: {name} has shape {stored.shape}, by {CONFIG} it is "
                    f"{view.stored_shape}."
                )
            if stored.dtype.kind == "i" or stored.dtype.itemsize == 1:
                raise UserError(
                    f"{self.directory}: {name} is stored as {stored.dtype.name}: quantised weights "
                    "are not read."
                )
            found[path] = view._replace(name=name)
        self._refuse_others({view.name for view in found.values()})
        return found

    def _name_of(self, name: str) -> str | None:
        """Returns the name in this folder of a tensor: with a prefix, without, or its other one."""
        architecture = self._architecture
        candidates = [architecture.prefix + name, name]
        if name in architecture.head_names:
            candidates = list(architecture.head_names)
        return next((candidate for candidate in candidates if candidate in self._stored), None)

    def _refuse_others(self, used: set[str]) -> None:
        head = self._architecture.head_names if self.model.tied_head else ()
        others = sorted(
            name
            for name in self._stored
            if name not in used
            and name not in head
            and not f".{name}".endswith(self._architecture.ignored)
        )
        if others:
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            raise UserError(
                f"{self.directory} holds {others[0]}{more}, which {CONFIG}'s model_type "
                f"{self._architecture.model_type!r} has no place for: it is another model, or an "
                "adapter that has not been merged."
            )


def _architecture_of(config: Mapping[str, Any], directory: Path) -> Architecture:
    kind = config.get("model_type")
    for architecture in ARCHITECTURES:
        if architecture.model_type == kind:
            return architecture
    known = ", ".join(architecture.model_type for architecture in ARCHITECTURES)
    raise UserError(f"{directory / CONFIG} is of model_type {kind!r}; tfbig reads {known}.")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = orjson.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except orjson.JSONDecodeError:
        raise UserError(f"{path} is damaged: not JSON.") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged: not a JSON object.")
    return value


def _read_headers(directory: Path) -> dict[str, tuple[Path, StoredTensor]]:
    """Returns file and place of each stored tensor."""
    if (directory / WEIGHTS).is_file():
        return _read_header(directory / WEIGHTS)
    if not (directory / INDEX).is_file():
        raise UserError(f"{directory} has no {WEIGHTS} and no {INDEX}.")
    names = _read_json(directory / INDEX).get("weight_map")
    if not isinstance(names, dict):
        raise UserError(f"{directory / INDEX} is damaged: it has no weight_map.")
    stored: dict[str, tuple[Path, StoredTensor]] = {}
    for file_name in sorted(set(map(str, names.values()))):
        if file_name != os.path.basename(file_name) or not file_name.endswith(".safetensors"):
            raise UserError(f"{directory / INDEX} names {file_name!r}: no safetensors file in it.")
        stored |= _read_header(directory / file_name)
    if missing := sorted(set(names) - set(stored)):
        raise UserError(f"{directory / INDEX} names {missing[0]}, which no file holds.")
    return stored


def _read_header(path: Path) -> dict[str, tuple[Path, StoredTensor]]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return {name: (path, tensor) for name, tensor in read_header(descriptor).items()}
        finally:
            os.close(descriptor)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}; get it again.") from None
