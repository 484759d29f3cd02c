"""Python's own source as the corpus that every machine has, written as the Pile is."""

import os
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import orjson
import zstandard

from data_pipeline.documents import document_key, split_of
from tfbig.durable_file import write_atomic
from tfbig.errors import UserError

STDLIB = "stdlib"  # the name of this --source
STDLIB_SOURCE = "Python stdlib"
# Installed packages are not the library and tests are more data than text.
# sitecustomize is the user's.
_STDLIB_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_STDLIB_SKIPPED_FILES = ("sitecustomize", "usercustomize", "_sysconfigdata")
_STDLIB_SKIPPED_FOLDERS |= {"__pycache__", "lib2to3/tests"}


def encode_jsonl_zst(documents: Iterable[tuple[str, str]]) -> bytes:
    """Returns (text, source) pairs in the Pile's form: one zstd frame of JSON lines.

    The frame has a checksum and its size, so that any damage is found.
    """
    lines = b"".join(
        orjson.dumps({"text": text, "meta": {"pile_set_name": source}}) + b"\n"
        for text, source in documents
    )
    compressor = zstandard.ZstdCompressor(level=3, write_checksum=True, write_content_size=True)
    return compressor.compress(lines)


def stdlib_texts(root: Path | None = None) -> Iterator[str]:
    """Yields the source files of the running Python's standard library, in sorted order.

    Args:
      root: the library's folder; None means the running Python's.

    Raises:
      UserError: this Python comes without its source.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    found = False
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(
            name
            for name in folders
            if name not in _STDLIB_SKIPPED_FOLDERS
            and os.path.relpath(os.path.join(folder, name), root) not in _STDLIB_SKIPPED_FOLDERS
        )
        for name in sorted(files):
            if not name.endswith(".py") or name.startswith(_STDLIB_SKIPPED_FILES):
                continue
            try:
                with tokenize.open(os.path.join(folder, name)) as file:
                    text = file.read()
            except (SyntaxError, UnicodeDecodeError):  # of no declared encoding: a test's fixture
                continue
            found = True
            if text:
                yield text
    if not found:
        raise UserError(
            f"--source=stdlib: {root} holds no .py files; install Python's library or give "
            "another --source."
        )


def stdlib_corpus(validation_fraction: float, test_fraction: float) -> dict[str, bytes]:
    """Returns the standard library as {corpus/SPLIT.jsonl.zst: contents}."""
    by_split: dict[str, list[tuple[str, str]]] = {}
    for text in stdlib_texts():
        split = split_of(document_key(text), validation_fraction, test_fraction)
        by_split.setdefault(split, []).append((text, STDLIB_SOURCE))
    return {
        f"corpus/{split}.jsonl.zst": encode_jsonl_zst(documents)
        for split, documents in sorted(by_split.items())
    }


def write_corpus(folder: Path, corpus: Mapping[str, bytes]) -> None:
    """Writes those files of a corpus that are not there as they should be."""
    for name, data in corpus.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_bytes() != data:
            write_atomic(path, data)
