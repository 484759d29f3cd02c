"""Raw text to a data folder: tokenizer, tokens, shards and, last, the manifest."""

import errno
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_pipeline import manifest
from data_pipeline.building import building, remove_marker
from data_pipeline.sharding import SplitShards, write_split
from data_pipeline.shards import RecordLayout, row_features
from data_pipeline.sources import InputFile, find_inputs, write_stdlib_corpus
from data_pipeline.tokenizer import Tokenizer, train_tokenizer
from data_pipeline.tokenizing import (
    STORE_FOLDER,
    Split,
    Tokenized,
    tokenize_inputs,
    training_texts,
)
from tfbig.config import PrepareConfig
from tfbig.durable_file import write_atomic
from tfbig.errors import UserError

STDLIB = "stdlib"
_MAX_SEED = 2**31 - 1
_NO_ROOM_OR_RIGHT = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)

Say = Callable[[str], None]


def default_folder(source: str, vocab_size: int, sequence_length: int) -> str:
    """Returns the data folder of a source when none is named.

    >>> default_folder("stdlib", 4096, 256)
    'data/stdlib_4096_256'
    """
    name = "".join(c if c.isalnum() else "_" for c in source)
    return f"data/{name}_{vocab_size}_{sequence_length}"


def is_prepared(path: str | os.PathLike[str]) -> bool:
    """Returns whether `path` is a complete data folder."""
    return manifest.exists(path)


def prepare(config: PrepareConfig, say: Say | None = None) -> Path:
    """Makes the data folder that `config` describes, unless it is there.

    Stopped at any point, it leaves a folder without a manifest; called again, it starts anew and
    writes the same bytes.

    Args:
      config: what to make of which text.
      say: is handed each message; None prints them.

    Returns:
      The folder.

    Raises:
      UserError: an option is out of range, the text is unfit or too little, or the folder is of
        other settings or not ours.
    """
    say = say or (lambda text: print(text, flush=True))
    _check_options(config)
    tokenizer = Tokenizer.load(config.tokenizer) if config.tokenizer else None
    settings = _settings(config, tokenizer)
    folder = Path(
        config.data or default_folder(config.source, config.vocab_size, config.sequence_length)
    )
    try:
        if manifest.exists(folder):
            _check_same(folder, settings)
            remove_marker(folder)
            say(f"{folder} is already prepared")
        else:
            inputs = None if config.source == STDLIB else find_inputs(config.source)
            with building(folder):
                _build(config, settings, folder, inputs, say)
    except OSError as error:
        if error.errno in _NO_ROOM_OR_RIGHT:
            raise UserError(f"cannot prepare {folder}: {error.strerror}.") from error
        raise
    return folder


def _check_options(config: PrepareConfig) -> None:
    if config.sequence_length < 1:
        raise UserError(f"--sequence_length={config.sequence_length} must be at least 1.")
    fractions = config.validation_fraction, config.test_fraction
    if min(fractions) < 0 or not sum(fractions) < 1:
        raise UserError(
            f"--validation_fraction={fractions[0]} and --test_fraction={fractions[1]} must be at "
            "least 0 and leave something to train on: their sum is below 1."
        )
    if not 0 <= config.seed <= _MAX_SEED:
        raise UserError(f"--seed={config.seed} must lie between 0 and {_MAX_SEED}.")


def _settings(config: PrepareConfig, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Returns what the folder's bytes depend on besides the text."""
    settings = {name: value for name, value in asdict(config).items() if name != "data"}
    settings["tokenizer"] = tokenizer.sha256 if tokenizer else ""
    settings["vocab_size"] = tokenizer.vocab_size if tokenizer else config.vocab_size
    return settings


def _check_same(folder: Path, settings: dict[str, Any]) -> None:
    """Raises UserError unless the folder was made with the same settings of the same files."""
    contents = manifest.read(folder).contents
    made_with = contents["settings"]
    problems = [
        f"{name} is {made_with.get(name)!r} there and {value!r} here"
        for name, value in settings.items()
        if made_with.get(name) != value
    ]
    if not problems and settings["source"] != STDLIB:
        for entry in contents["inputs"]:
            path = Path(entry["path"])
            if path.exists() and path.stat().st_size != entry["bytes"]:
                problems.append(f"{path} has changed since")
    if problems:
        raise UserError(
            f"{folder} is prepared otherwise: {'; '.join(problems)}. Name another --data or remove "
            "the folder."
        )


def _build(
    config: PrepareConfig,
    settings: dict[str, Any],
    folder: Path,
    inputs: list[InputFile] | None,
    say: Say,
) -> None:
    """Goes through the stages; the manifest is the last thing written."""
    start = time.perf_counter()
    say(f"preparing {folder} from {config.source}")
    split = Split(config.validation_fraction, config.test_fraction)
    if inputs is None:
        inputs = write_stdlib_corpus(folder, split.validation_fraction, split.test_fraction)
        say(f"  corpus written ({time.perf_counter() - start:.1f} s)")
    tokenizer = _make_tokenizer(config, folder, inputs, split, say)
    tokenized = tokenize_inputs(inputs, split, tokenizer, folder, say)
    layout = RecordLayout(row_features(config.sequence_length, tokenizer.dtype))
    splits = _write_splits(config, folder, tokenizer, tokenized, layout, say)
    manifest.write_dataset_info(folder, layout, {s: made.shards for s, made in splits.items()})
    if not config.keep_tokens:
        shutil.rmtree(folder / STORE_FOLDER)
    sources = sorted({source for _, source in tokenized.stores})
    manifest.write(
        folder,
        {
            "settings": settings,
            "tokenizer": {
                "sha256": tokenizer.sha256,
                "vocab_size": tokenizer.vocab_size,
                "end_of_text_id": tokenizer.end_of_text_id,
            },
            "seed": config.seed,
            "sequence_length": config.sequence_length,
            "dtype": tokenizer.dtype.name,
            "stride": layout.stride,
            "features": layout.to_manifest(),
            "packing": {"policy": "join", "shuffle": "documents", "tail": "drop"},
            "sources": sources,
            "mixture": [{"first_sample": 0, "weights": dict.fromkeys(sources, 1.0)}],
            "token_store": STORE_FOLDER if config.keep_tokens else "",
            "inputs": tokenized.inputs,
            "splits": {name: made.to_manifest() for name, made in splits.items()},
        },
    )
    say(f"{folder} is ready ({time.perf_counter() - start:.1f} s in all)")


def _make_tokenizer(
    config: PrepareConfig, folder: Path, inputs: list[InputFile], split: Split, say: Say
) -> Tokenizer:
    """Returns the given tokenizer, or one trained on the train split; the folder keeps it."""
    if config.tokenizer:
        contents = Path(config.tokenizer).read_bytes()
    else:
        start = time.perf_counter()
        contents = train_tokenizer(training_texts(inputs, split, say), config.vocab_size)
        say(f"  tokenizer trained on the train split ({time.perf_counter() - start:.1f} s)")
    write_atomic(folder / manifest.TOKENIZER, contents)
    return Tokenizer(contents)


def _write_splits(
    config: PrepareConfig,
    folder: Path,
    tokenizer: Tokenizer,
    tokenized: Tokenized,
    layout: RecordLayout,
    say: Say,
) -> dict[str, SplitShards]:
    """Returns the splits that have rows.

    Raises:
      UserError: a split that was asked for has too little text for one row.
    """
    length = config.sequence_length
    rows_per_shard = config.shard_bytes // layout.stride
    if rows_per_shard < 1:
        raise UserError(
            f"--shard_bytes={config.shard_bytes} is less than one row of {length} tokens, which "
            f"takes {layout.stride} bytes."
        )
    asked = {"train": 1.0, "validation": config.validation_fraction, "test": config.test_fraction}
    splits = {}
    for split, fraction in asked.items():
        if not fraction:
            continue
        start = time.perf_counter()
        made = write_split(
            split, tokenized, folder, tokenizer, layout, rows_per_shard, length, config.seed
        )
        if not made.shards:
            raise UserError(
                f"the {split} split has {made.total('dropped_tokens')} tokens in "
                f"{made.total('documents')} documents: no row of --sequence_length={length}. Give "
                "more text, a shorter sequence, or another fraction."
            )
        say(
            f"  {split}: {made.total('rows'):,} rows of {length} tokens, {made.total('bytes'):,} "
            f"bytes of text; {made.total('dropped_tokens'):,} tokens at the end fill no row "
            f"({time.perf_counter() - start:.1f} s)"
        )
        splits[split] = made
    return splits
