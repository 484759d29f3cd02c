"""Where documents come from: files of documents, and Python's own source as the default corpus."""

import glob
import json
import os
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import orjson
import zstandard

from tfbig.durable_file import write_atomic
from tfbig.errors import UserError

SUFFIXES = (".jsonl.zst", ".jsonl", ".txt")
UNNAMED_SOURCE = "text"  # of documents that don't say where they are from
STDLIB_SOURCE = "Python stdlib"
_READ_BYTES = 1 << 18
# Installed packages are not the library and tests are more data than text.
# sitecustomize is the user's.
_STDLIB_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_STDLIB_SKIPPED_FILES = ("sitecustomize", "usercustomize", "_sysconfigdata")
_STDLIB_SKIPPED_FOLDERS |= {"__pycache__", "lib2to3/tests"}


class Document(NamedTuple):
    """One text."""

    text: str
    source: str
    key: int  # uint64 hash of the text: decides its split and its place in the shuffle


class InputFile(NamedTuple):
    """One file of documents."""

    path: Path
    name: str  # as the manifest names it
    split: str  # "" where each document's hash decides


@dataclass
class ReadCounts:
    """What was read, and what was not taken as it was.

    Attributes:
      documents: texts read.
      skipped: records left out, by reason.
      changed: texts altered, by reason.
    """

    documents: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)


def document_key(text: str) -> int:
    """Returns a uint64 that depends on the text alone, not on where or when it is read."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def split_of(key: int, validation_fraction: float, test_fraction: float) -> str:
    """Returns the split of a document; equal texts are always in the same one."""
    place = key / 2.0**64
    if place < validation_fraction:
        return "validation"
    return "test" if place < validation_fraction + test_fraction else "train"


def find_inputs(source: str) -> list[InputFile]:
    """Returns the files that a path, a folder or a glob names, sorted by name.

    Raises:
      UserError: there are none, or one is of a kind that is not read.
    """
    if os.path.isdir(source):
        source = os.path.join(source, "**")
        names = [n for n in glob.glob(source, recursive=True) if n.endswith(SUFFIXES)]
    else:
        names = [source] if os.path.exists(source) else glob.glob(source, recursive=True)
    names = sorted(name for name in names if os.path.isfile(name))
    if not names:
        raise UserError(
            f"--source={source} names no file: give stdlib, or a file, folder or glob of "
            f"{', '.join(SUFFIXES)} files."
        )
    for name in names:
        if not name.endswith(SUFFIXES):
            raise UserError(f"{name}: only {', '.join(SUFFIXES)} files are read.")
    return [InputFile(Path(name), name, "") for name in names]


def read_documents(path: Path, counts: ReadCounts) -> Iterator[Document]:
    """Yields the documents of one file.

    A .jsonl record is {"text": ..., "meta": {"pile_set_name": ...}}, the Pile's form; a .txt file
    is one document. Lone surrogates become U+FFFD and empty texts are skipped; both are counted.

    Args:
      path: ends with one of SUFFIXES.
      counts: is added to.

    Raises:
      UserError: the file is damaged or cut short, or a record is not of that form.
    """
    if path.name.endswith(".txt"):
        records: Iterable[tuple[str, object, str]] = [_read_text_file(path)]
    else:
        chunks = _zstd_chunks(path) if path.name.endswith(".zst") else _file_chunks(path)
        records = _parse_lines(path, _lines(chunks))
    for where, text, source in records:
        if not isinstance(text, str):
            raise UserError(f"{where}: its text is {type(text).__name__}, not a string.")
        if not text:
            counts.skipped["empty text"] += 1
            continue
        if not text.isascii() and _has_surrogate(text):
            # Pairs written as two escapes are joined, what remains alone is no character.
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            counts.changed["lone surrogate replaced by U+FFFD"] += 1
        counts.documents += 1
        yield Document(text, source, document_key(text))


def _has_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _read_text_file(path: Path) -> tuple[str, object, str]:
    try:
        return str(path), path.read_bytes().decode("utf-8-sig"), UNNAMED_SOURCE
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 at byte {error.start}.") from None


def _parse_lines(path: Path, lines: Iterator[bytes]) -> Iterator[tuple[str, object, str]]:
    """Yields (file and line, text, source) of each record."""
    for number, line in enumerate(lines, 1):
        where = f"{path} line {number}"
        if number == 1 and line.startswith(b"\xef\xbb\xbf"):
            line = line[3:]
        if not line.strip():
            continue
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            try:  # accepts lone surrogates, which orjson does not
                record = json.loads(line)
            except ValueError as error:
                raise UserError(f"{where} is not valid JSON: {error}") from None
        if not isinstance(record, dict) or "text" not in record:
            raise UserError(f'{where} has no field "text".')
        meta = record.get("meta")
        source = meta.get("pile_set_name") if isinstance(meta, dict) else None
        yield where, record["text"], source if isinstance(source, str) else UNNAMED_SOURCE


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yields lines, ended by newline alone: U+2028 and the like may stand inside a record."""
    pieces: list[bytes] = []  # of a line that spans chunks; joined once, however long it is
    for chunk in chunks:
        first, *rest = chunk.split(b"\n")
        pieces.append(first)
        if rest:
            yield b"".join(pieces)
            yield from rest[:-1]
            pieces = [rest[-1]]
    last = b"".join(pieces)
    if last:
        yield last


def _file_chunks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while chunk := file.read(_READ_BYTES):
            yield chunk


def _zstd_chunks(path: Path) -> Iterator[bytes]:
    """Yields the contents of all frames of a file.

    zstandard's stream readers stop after the first frame, and hand out a cut file without a word:
    here the end of each frame is asked for.
    """
    decompressor = zstandard.ZstdDecompressor()
    frame, inside = decompressor.decompressobj(), False
    for chunk in _file_chunks(path):
        while chunk:
            if frame.eof:
                frame = decompressor.decompressobj()
            try:
                data = frame.decompress(chunk)
            except zstandard.ZstdError as error:
                why = "it is a Git LFS pointer, not the file" if _is_pointer(path) else str(error)
                raise UserError(f"{path} is not intact zstd data: {why}.") from None
            chunk, inside = frame.unused_data, not frame.eof
            if data:
                yield data
    if inside:
        raise UserError(f"{path} is cut short: its last zstd frame has no end.")


def _is_pointer(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(24).startswith(b"version https://git-lfs")


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


def write_stdlib_corpus(
    folder: Path, validation_fraction: float, test_fraction: float
) -> list[InputFile]:
    """Writes the standard library as FOLDER/corpus/SPLIT.jsonl.zst and returns those files."""
    by_split: dict[str, list[tuple[str, str]]] = {}
    for text in stdlib_texts():
        split = split_of(document_key(text), validation_fraction, test_fraction)
        by_split.setdefault(split, []).append((text, STDLIB_SOURCE))
    (folder / "corpus").mkdir(exist_ok=True)
    inputs = []
    for split, documents in sorted(by_split.items()):
        name = f"corpus/{split}.jsonl.zst"
        write_atomic(folder / name, encode_jsonl_zst(documents))
        inputs.append(InputFile(folder / name, name, split))
    return inputs
