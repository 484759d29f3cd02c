"""A checkpoint written as a Hugging Face folder, one tensor in memory at a time. TF-free."""

import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import orjson

from tfbig.checkpoint_format import LazyArray
from tfbig.config import ModelConfig
from tfbig.durable_file import write_atomic
from tfbig.errors import UserError
from tfbig.interop.architecture import Architecture
from tfbig.interop.gpt2 import GPT2
from tfbig.interop.gpt_neox import GPT_NEOX
from tfbig.interop.hugging_face_folder import (
    CONFIG,
    GENERATION_CONFIG,
    INDEX,
    TOKENIZER,
    WEIGHTS,
)
from tfbig.interop.tensor_view import TensorView
from tfbig.safetensors_file import TensorToWrite, dtype_of, write_tensors


class Weights(Protocol):
    """What is exported: a checkpoint, its averages, or a model with adapters merged in."""

    def read(
        self, path: str, start: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None
    ) -> np.ndarray: ...


class ExportedTokenizer(NamedTuple):
    """What a folder says of its tokenizer.

    Attributes:
      contents: of tokenizer.json.
      vocab_size: ids are below it.
      end_of_text: the token.
      end_of_text_id: its id.
    """

    contents: bytes
    vocab_size: int
    end_of_text: str
    end_of_text_id: int


def architecture_for(model: ModelConfig) -> Architecture:
    """Returns the architecture that computes what a model of ours computes.

    Raises:
      UserError: Hugging Face's GPT-2 and GPT-NeoX both lack something that the model has.
    """
    problems = []
    if model.norm_order != "pre":
        problems.append(f"--norm_order={model.norm_order}")
    if not model.final_norm:
        problems.append("--nofinal_norm")
    if model.head_bias:
        problems.append("--head_bias")
    if model.num_heads * model.attention_head_dim != model.embed_dim:
        problems.append(f"--head_dim={model.attention_head_dim} (not embed_dim / num_heads)")
    if model.position_embedding == "learned" and model.parallel_residual:
        problems.append("--parallel_residual with learned positions")
    if problems:
        raise UserError(
            f"--format=hf: transformers' GPT-2 and GPT-NeoX have no {', no '.join(problems)}. "
            "Take --format=keras or --format=saved_model, which hold any model."
        )
    return GPT_NEOX if model.position_embedding == "rotary" else GPT2


def write_folder(
    directory: Path,
    weights: Weights,
    model: ModelConfig,
    tokenizer: ExportedTokenizer,
    dtype: str = "float32",
    max_shard_bytes: int = 5_000_000_000,
) -> list[str]:
    """Writes config, weights, tokenizer and generation settings into an existing empty folder.

    Args:
      directory: to write into.
      weights: the model's, float32.
      model: what is written; with a vocab_size below the weights', the rows beyond are left out.
      tokenizer: the model's.
      dtype: to store the weights in: float32, bfloat16 or float16.
      max_shard_bytes: most bytes of tensors in one file.

    Returns:
      What the reader of the folder should know, a line each.

    Raises:
      UserError: no architecture of the library fits the model.
    """
    architecture = architecture_for(model)
    files = _write_weights(directory, architecture, weights, model, dtype, max_shard_bytes)
    _write_json(
        directory / CONFIG,
        {
            "architectures": [architecture.class_name],
            "model_type": architecture.model_type,
            **architecture.write_fields(model),
            "bos_token_id": tokenizer.end_of_text_id,
            "eos_token_id": tokenizer.end_of_text_id,
            "torch_dtype": dtype,
            "use_cache": True,
        },
    )
    _write_generation_config(directory, model, tokenizer)
    _write_tokenizer(directory, model, tokenizer)
    return [*_notes(architecture, model, tokenizer), f"weights in {files}"]


def _notes(
    architecture: Architecture, model: ModelConfig, tokenizer: ExportedTokenizer
) -> Iterator[str]:
    if architecture is GPT_NEOX and model.embedding_dropout != model.dropout:
        yield (
            f"GPT-NeoX has one dropout rate: {model.dropout} is written, embedding_dropout "
            f"{model.embedding_dropout} is not (it matters for further training only)"
        )
    padding = model.vocab_size - tokenizer.vocab_size
    if padding > 0:
        yield (
            f"the vocabulary has {padding} rows that are no token; {GENERATION_CONFIG} keeps them "
            "from being generated, --trim_vocabulary leaves them out"
        )


def _stored_tensors(
    architecture: Architecture, weights: Weights, model: ModelConfig, dtype: np.dtype
) -> Iterator[TensorToWrite]:
    """Yields what is to be written; arrays are read when their turn comes."""
    for path, view in architecture.views(model).items():
        is_head = view.name in architecture.head_names
        name = view.name if is_head else architecture.prefix + view.name

        def load(path: str = path, view: TensorView = view) -> np.ndarray:
            value = weights.read(path, (0,) * len(view.shape), view.shape)
            return view.to_stored(value).astype(dtype, copy=False)

        array = LazyArray(view.stored_shape, dtype, load)
        yield TensorToWrite(name, dtype, view.stored_shape, array)


def split_by_size(
    tensors: Sequence[TensorToWrite], max_shard_bytes: int
) -> list[list[TensorToWrite]]:
    """Returns tensors in files, in order, each file as full as it may be.

    Args:
      tensors: at least one.
      max_shard_bytes: of a file; a larger tensor gets a file of its own.
    """
    files: list[list[TensorToWrite]] = [[]]
    room = max_shard_bytes
    for tensor in tensors:
        num_bytes = math.prod(tensor.shape) * tensor.dtype.itemsize
        if files[-1] and num_bytes > room:
            files.append([])
            room = max_shard_bytes
        files[-1].append(tensor)
        room -= num_bytes
    return files


def _write_weights(
    directory: Path,
    architecture: Architecture,
    weights: Weights,
    model: ModelConfig,
    dtype: str,
    max_shard_bytes: int,
) -> str:
    """Writes one file, or several and their index; returns which."""
    tensors = list(_stored_tensors(architecture, weights, model, dtype_of(dtype)))
    files = split_by_size(tensors, max_shard_bytes)
    metadata = {"format": "pt"}  # the transformers library wants to know whose layout it is
    if len(files) == 1:
        write_tensors(directory / WEIGHTS, files[0], metadata)
        return WEIGHTS
    total = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)
    weight_map: dict[str, str] = {}
    for number, file in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        weight_map |= {tensor.key: name for tensor in file}
        write_tensors(directory / name, file, metadata)
    _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return f"{len(files)} files and {INDEX}"


def _write_generation_config(
    directory: Path, model: ModelConfig, tokenizer: ExportedTokenizer
) -> None:
    end = tokenizer.end_of_text_id
    settings: dict[str, Any] = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    if model.vocab_size > tokenizer.vocab_size:
        settings["suppress_tokens"] = list(range(tokenizer.vocab_size, model.vocab_size))
    _write_json(directory / GENERATION_CONFIG, settings)


def _write_tokenizer(directory: Path, model: ModelConfig, tokenizer: ExportedTokenizer) -> None:
    write_atomic(directory / TOKENIZER, tokenizer.contents)
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokenizer.end_of_text,
            "eos_token": tokenizer.end_of_text,
            "unk_token": tokenizer.end_of_text,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": model.max_length,
        },
    )


def trimmed(model: ModelConfig, vocab_size: int) -> ModelConfig:
    """Returns the model without the rows of its vocabulary that are no token.

    Args:
      model: to be exported.
      vocab_size: of its tokenizer.
    """
    return dataclasses.replace(model, vocab_size=min(model.vocab_size, vocab_size))


def _write_json(path: str | os.PathLike[str], value: dict[str, Any]) -> None:
    write_atomic(path, orjson.dumps(value, option=orjson.OPT_INDENT_2) + b"\n")
