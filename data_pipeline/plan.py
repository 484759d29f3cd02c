"""The plan of a preparation: inputs, their large files split, and chunks of about equal size."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.codecs import is_remote
from data_pipeline.documents import DOCUMENT_HASH
from data_pipeline.input_files import InputFile
from data_pipeline.reading import Piece, zip_member_ranges
from data_pipeline.work import FOLDER, Result
from tfbig.config import PrepareConfig

PLAN = f"{FOLDER}/plan.json"
# What the tokenizing of a chunk depends on besides its pieces and the tokenizer.
_TEXT_OPTIONS = (
    "seed validation_fraction test_fraction min_characters max_characters exclude_source"
    " prompt_field completion_field chat_field max_bad_fraction"
).split()
# Options that neither bytes nor work depend on: hosts that share a folder may differ in them.
_OF_A_HOST = ("data", "workers", "dry_run")
SPLIT_FORMS = ("lines", "json", "lengths", "tar")  # read from the beginning on
# Of the rules below: what is done beyond the tokenizing names chunks by their numbers, so that a
# folder half done by other rules has to do that anew.
_CUTS = 2
# Text is about so many times its compressed size, for the planning of chunks only.
_EXPANSION = 3


@dataclass(frozen=True)
class Plan:
    """What every worker on a data folder goes by.

    Args:
      settings: what the folder's bytes depend on besides the text.
      config: the options.
      inputs: all files.
    """

    settings: dict[str, Any]
    config: PrepareConfig
    inputs: list[InputFile]

    def to_bytes(self) -> bytes:
        """Returns the plan's file; equal plans give equal bytes."""
        names = (name for name in self.config.__dataclass_fields__ if name not in _OF_A_HOST)
        config = {name: getattr(self.config, name) for name in names}
        values = {
            "settings": self.settings,
            "config": config,
            "inputs": [item.to_json() for item in self.inputs],
            "cuts": _CUTS,
        }
        return json.dumps(values, ensure_ascii=False, sort_keys=True).encode()

    @classmethod
    def read(cls, folder: Path) -> "Plan":
        """Returns the plan of a folder that is being prepared; each host has its own workers."""
        values = json.loads((folder / PLAN).read_bytes())
        options: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values["config"].items()
        }
        config = PrepareConfig(**options)
        inputs = [InputFile.from_json(item) for item in values["inputs"]]
        return cls(values["settings"], config, inputs)

    @property
    def sha256(self) -> str:
        """Names the plan."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def num_tasks(self) -> int:
        """Returns how many processes have something to do, about."""
        num_bytes = sum(_text_bytes(item) for item in self.inputs)
        return max(1, -(-num_bytes // self.config.chunk_bytes))

    def large_inputs(self) -> dict[str, int]:
        """Returns the splitting stage: {item: input} of files of records that are much text."""
        options = {"chunk_bytes": self.config.chunk_bytes}
        return {
            f"split-{self._name_of([Piece(number)], options)}": number
            for number, item in enumerate(self.inputs)
            if item.form in SPLIT_FORMS and _text_bytes(item) > 2 * self.config.chunk_bytes
        }

    def num_recoded_bytes(self) -> int:
        """Returns about what the parts of recoded inputs take on disk."""
        large = (self.inputs[number] for number in self.large_inputs().values())
        return sum(item.num_bytes for item in large if is_recoded(item))

    def chunks(self, splits: Mapping[int, Result]) -> list[list[Piece]]:
        """Returns the pieces of each chunk.

        Args:
          splits: results of the splitting stage, by input.
        """
        chunks: list[list[Piece]] = []
        waiting: list[Piece] = []
        size = 0
        for number, item in enumerate(self.inputs):
            if number in splits:
                chunks += [[Piece(**piece)] for piece in splits[number]["pieces"]]
                continue
            ranges = _ranges(item, self.config.chunk_bytes)
            if len(ranges) > 1:
                chunks += [[Piece(number, start, stop)] for start, stop in ranges]
                continue
            waiting.append(Piece(number))
            size += _text_bytes(item)
            if size >= self.config.chunk_bytes:
                chunks.append(waiting)
                waiting, size = [], 0
        return [*chunks, waiting] if waiting else chunks

    def chunk_items(self, chunks: list[list[Piece]], tokenizer_sha256: str) -> list[str]:
        """Returns the items of the tokenizing stage, named by all that their results depend on.

        So a chunk stays done when another input, the sequence length or the packing changes.
        """
        values = {name: getattr(self.config, name) for name in _TEXT_OPTIONS}
        values["tokenizer"], values["document_hash"] = tokenizer_sha256, DOCUMENT_HASH
        if self.config.prompt_field or self.config.completion_field or self.config.chat_field:
            values["sequence_length"] = self.config.sequence_length
        return [f"chunk-{self._name_of(pieces, values)}" for pieces in chunks]

    def _name_of(self, pieces: list[Piece], values: dict[str, Any]) -> str:
        described = [
            [self.inputs[piece.number].to_json(), piece.start, piece.stop, piece.part, piece.number]
            for piece in pieces
        ]
        data = json.dumps([described, values], sort_keys=True).encode()
        return hashlib.sha256(data).hexdigest()[:20]


def _text_bytes(item: InputFile) -> int:
    return item.num_bytes * (_EXPANSION if item.codec or item.form in ("zip", "parquet") else 1)


def _ranges(item: InputFile, chunk_bytes: int) -> list[tuple[int, int]]:
    """Returns ranges of a large input that is read at any place; one range for any other."""
    if item.num_bytes <= chunk_bytes:
        return [(0, -1)]
    if item.form == "parquet":
        from data_pipeline.parquet_source import row_group_ranges

        return row_group_ranges(item, chunk_bytes)
    if item.form == "zip":
        return zip_member_ranges(item, chunk_bytes)
    if item.form == "tfds":
        from data_pipeline.tfds_source import example_ranges

        return example_ranges(item, chunk_bytes)
    if item.form in ("megatron", "tokens", "nanogpt"):
        from data_pipeline.token_sources import document_ranges

        return document_ranges(item, chunk_bytes)
    return [(0, -1)]


def is_recoded(item: InputFile) -> bool:
    """Returns whether a large input's parts are files of their own, not ranges of it."""
    return bool(item.codec) or item.form == "tar" or is_remote(item.path)
