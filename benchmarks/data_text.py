"""The text that benchmarks/data.py prepares: pages of real documents as jsonl.zst, and a BPE."""

import gzip
import html
import json
import os
import re
import shutil
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

import zstandard

PAGE_CHARACTERS = 4096
FILE_BYTES = 50e6  # of text in one file
_SUFFIXES = (".txt", ".rst", ".html", ".md", ".py")
_TAG = re.compile(r"<(script|style)\b.*?</\1>|<[^>]+>", re.DOTALL)


def installed_text() -> list[Path]:
    """Returns folders of real text that every machine has: Python's library and packages."""
    return [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]


def pages(folders: Sequence[Path]) -> Iterator[str]:
    """Yields pages of about 4 KiB, cut at blank lines, of the text files; no page comes twice."""
    seen = set()
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            name = path.name.removesuffix(".gz")
            if not name.endswith(_SUFFIXES) or not path.is_file():
                continue
            data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            text = data.decode("utf-8", "ignore")
            if name.endswith(".html"):
                text = html.unescape(_TAG.sub("", text))
            for page in _pages_of(text):
                digest = blake2b(page.encode("utf-8", "replace"), digest_size=16).digest()
                if digest not in seen:
                    seen.add(digest)
                    yield page


def _pages_of(text: str) -> Iterator[str]:
    page, size = [], 0
    for paragraph in re.split(r"\n\s*\n", text):
        page.append(paragraph)
        size += len(paragraph)
        if size >= PAGE_CHARACTERS:
            yield "\n\n".join(page)
            page, size = [], 0
    if size > 200:
        yield "\n\n".join(page)


def make_corpus(folders: Sequence[Path], corpus: Path, most_bytes: float) -> None:
    """Writes jsonl.zst files of about 50 MB of text each, unless they are there.

    Args:
      folders: of real text.
      corpus: folder to write.
      most_bytes: of text.
    """
    if corpus.exists():
        return
    temporary = corpus.with_name(corpus.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    part: list[bytes] = []
    size = total = number = 0
    for page in pages(folders):
        line = json.dumps({"text": page, "meta": {"pile_set_name": "documentation"}})
        part.append(line.encode())
        size += len(page.encode("utf-8", "replace"))
        if size > FILE_BYTES or total + size > most_bytes:
            _write(temporary / f"{number:02d}.jsonl.zst", part)
            total, part, size, number = total + size, [], 0, number + 1
        if total > most_bytes:
            break
    if part:
        _write(temporary / f"{number:02d}.jsonl.zst", part)
    temporary.rename(corpus)


def _write(path: Path, lines: Iterable[bytes]) -> None:
    """Writes one frame at level 3, without size and checksum, as lm_dataformat does."""
    with open(path, "wb") as file, zstandard.ZstdCompressor(level=3).stream_writer(file) as writer:
        for line in lines:
            writer.write(line + b"\n")


def make_tokenizer(corpus: Path, path: Path, vocab_size: int, most_bytes: float) -> None:
    """Trains a BPE on pages taken evenly from the corpus, unless it is there."""
    from data_pipeline.documents import ReadCounts
    from data_pipeline.reading import read_documents
    from data_pipeline.tokenizer import train_tokenizer

    if path.exists():
        return
    files = sorted(corpus.iterdir())
    texts = []
    for file in files:
        room = most_bytes / len(files)
        for number, document in enumerate(read_documents(file, ReadCounts())):
            if number % 3 == 0:
                texts.append(document.text)
                room -= len(document.text)
            if room < 0:
                break
    contents = train_tokenizer(texts, vocab_size)
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(contents)
    os.replace(temporary, path)
