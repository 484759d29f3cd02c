"""Raw text to a data folder: options checked, processes started, stages gone through."""

import contextlib
import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from data_pipeline import manifest
from data_pipeline.building import building, finish_building
from data_pipeline.documents import DOCUMENT_HASH
from data_pipeline.encoders import TokenEncoder
from data_pipeline.estimating import estimate
from data_pipeline.input_files import (
    InputFile,
    RecordFormat,
    check_apart,
    check_local,
    find_inputs,
)
from data_pipeline.plan import Plan
from data_pipeline.stages import Stages
from data_pipeline.stdlib_corpus import STDLIB, stdlib_corpus, write_corpus
from data_pipeline.tokenizer import Tokenizer, check_vocab_size
from tfbig.command import EXIT_USER_ERROR
from tfbig.config import PrepareConfig
from tfbig.errors import UserError
from tfbig.number_rules import integer_problems, way_out

_MAX_SEED = 2**31 - 1
_NO_ROOM_OR_RIGHT = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)
# What the folder's bytes don't depend on.
_ONLY_HOW = ("data", "workers", "encoder", "chunk_bytes", "dry_run")

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

    Stopped at any point, it leaves a folder without a manifest; called again, it goes on with what
    is not done and writes the same bytes. Any number of processes may prepare one folder: each
    takes what no other has taken.

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
    encoder = None
    if tokenizer and config.encoder != "auto":
        encoder = TokenEncoder(tokenizer, config.encoder)
    settings = _settings(config, tokenizer)
    folder = Path(
        config.data or default_folder(config.source, config.vocab_size, config.sequence_length)
    )
    if config.dry_run:
        inputs, corpus = inputs_of(config, folder)
        if corpus:
            raise UserError("--dry_run estimates files; stdlib takes half a minute anyway.")
        estimate(config, inputs, config.workers or num_cores(), say)
        return folder
    try:
        if manifest.exists(folder):
            _check_same(folder, settings)
            finish_building(folder)
            say(f"{folder} is already prepared")
        else:
            _build(config, settings, folder, tokenizer, encoder, say)
    except OSError as error:
        if error.errno in _NO_ROOM_OR_RIGHT:
            raise UserError(
                f"cannot prepare {folder}: {error.strerror}. What is complete is kept: make room "
                "and run the same command again."
            ) from error
        raise
    say(f"  corpus sha256 {manifest.corpus_sha256(manifest.read(folder).contents)}")
    return folder


def inputs_of(config: PrepareConfig, folder: Path) -> tuple[list[InputFile], dict[str, bytes]]:
    """Returns the input files that `config` names, and the contents of those that we write.

    Args:
      config: the options.
      folder: of the data, which the standard library's corpus is written to.
    """
    if config.source == STDLIB:
        corpus = stdlib_corpus(config.validation_fraction, config.test_fraction)
        inputs = [
            InputFile(
                str(folder / name),
                name,
                split=os.path.basename(name).split(".")[0],
                num_bytes=len(data),
            )
            for name, data in corpus.items()
        ]
        return inputs, corpus
    overrides = RecordFormat(
        config.text_field,
        config.source_field,
        config.source_name,
        config.prompt_field,
        config.completion_field,
        config.chat_field,
    )
    inputs = find_inputs(config.source, overrides)
    check_apart(config.source, inputs, str(folder))
    return inputs, {}


def _check_options(config: PrepareConfig) -> None:
    check_local(config.data, "data")
    for problem in integer_problems(config):
        raise UserError(problem)
    if config.sequence_length < 1:
        raise UserError(
            f"--sequence_length={config.sequence_length} must be at least 1: give e.g. 256."
        )
    fractions = config.validation_fraction, config.test_fraction
    if min(fractions) < 0 or not sum(fractions) < 1:
        raise UserError(
            f"--validation_fraction={fractions[0]} and --test_fraction={fractions[1]} must be at "
            "least 0 and leave something to train on: give shares whose sum is below 1."
        )
    for name in ("shard_bytes", "chunk_bytes"):
        if getattr(config, name) < 1:
            raise UserError(
                f"--{name}={getattr(config, name)} must be at least 1: {way_out(config, name)}"
            )
    for name in ("workers", "min_characters", "max_characters", "order_block_bytes"):
        if getattr(config, name) < 0:
            raise UserError(
                f"--{name}={getattr(config, name)} must not be negative: {way_out(config, name)}"
            )
    if 0 < config.max_characters < config.min_characters:
        raise UserError(
            f"--min_characters={config.min_characters} and --max_characters={config.max_characters}"
            " leave nothing: the first must not exceed the second."
        )
    for name in ("max_bad_fraction", "near_duplicates"):
        if not 0 <= getattr(config, name) <= 1:
            raise UserError(
                f"--{name}={getattr(config, name)} must lie between 0 and 1: "
                f"{way_out(config, name)}"
            )
    if config.near_duplicates:
        from data_pipeline.near_duplicates import rensa

        rensa()
    if not config.tokenizer:
        check_vocab_size(config.vocab_size)
    if bool(config.prompt_field) != bool(config.completion_field):
        raise UserError("--prompt_field and --completion_field go together: give both or neither.")
    if config.chat_field and config.prompt_field:
        raise UserError("--chat_field and --prompt_field are two forms of records: give one.")
    if not 0 <= config.seed <= _MAX_SEED:
        raise UserError(
            f"--seed={config.seed} must lie between 0 and {_MAX_SEED}: {way_out(config, 'seed')}"
        )


def _settings(config: PrepareConfig, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Returns what the folder's bytes depend on besides the text."""
    settings = {name: value for name, value in asdict(config).items() if name not in _ONLY_HOW}
    if not config.chat_field:
        del settings["chat_field"]  # folders made before there was one stay the same
    settings["exclude_source"] = list(config.exclude_source)
    settings["document_hash"] = DOCUMENT_HASH
    settings["tokenizer"] = tokenizer.sha256 if tokenizer else ""
    settings["vocab_size"] = tokenizer.vocab_size if tokenizer else config.vocab_size
    return dict(sorted(settings.items()))


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
    tokenizer: Tokenizer | None,
    encoder: TokenEncoder | None,
    say: Say,
) -> None:
    """Takes part in the making of the folder, with as many processes as are worth it."""
    start = time.perf_counter()
    inputs, corpus = inputs_of(config, folder)
    absolute = [
        replace(item, path=os.path.abspath(item.path))
        if item.form != "tfds" and "://" not in item.path
        else item
        for item in inputs
    ]
    plan = Plan(settings, replace(config, data=str(folder)), absolute)
    with building(folder, plan.to_bytes()):
        write_corpus(folder, corpus)
        num_bytes = sum(item.num_bytes for item in inputs)
        say(f"preparing {folder} from {len(inputs):,} files ({num_bytes / 1e6:,.1f} MB)")
        workers = min(config.workers or num_cores(), plan.num_tasks())
        stages = Stages(plan, folder, max(1, num_cores() // workers), say, tokenizer, encoder)
        with _helpers(folder, workers - 1, say):
            stages.run()
    say(f"{folder} is ready ({time.perf_counter() - start:.1f} s in all)")


@contextlib.contextmanager
def _helpers(folder: Path, count: int, say: Say) -> Iterator[None]:
    """Keeps `count` more processes at work on the folder; one that dies is done without."""
    command = [sys.executable, "-m", "data_pipeline.worker", str(folder), str(count + 1)]
    root = str(Path(__file__).resolve().parents[1])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH")) if p)
    }
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) for _ in range(count)
    ]
    ended = threading.Event()

    def watch() -> None:
        reported = set()
        while not ended.wait(1.0):
            for number, process in enumerate(processes):
                if process.poll() and number not in reported:  # 0 is a worker that found no work
                    reported.add(number)
                    code = process.returncode
                    if code != EXIT_USER_ERROR:  # this process meets the same mistake
                        say(f"  a worker ended with code {code}; its work is done by the others")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def num_cores() -> int:
    """Returns how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
