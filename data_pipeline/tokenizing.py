"""Files of documents to token stores: one store for each split and source."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from data_pipeline.sources import Document, InputFile, ReadCounts, read_documents, split_of
from data_pipeline.token_store import TokenStoreWriter
from data_pipeline.tokenizer import Tokenizer
from tfbig.durable_file import digest_file

STORE_FOLDER = "tokens"
_BATCH_CHARACTERS = 1 << 22  # text that is encoded at a time
_TRAINING_CHARACTERS = 1 << 28  # text that a tokenizer is trained on at most

Part = tuple[str, str]  # split, source


@dataclass(frozen=True)
class Split:
    """Decides which split a document is in.

    Args:
      validation_fraction: share of documents, by hash of their text.
      test_fraction: the same.
    """

    validation_fraction: float
    test_fraction: float

    def of(self, item: InputFile, document: Document) -> str:
        """Returns the file's own split, or that of the document's hash."""
        fractions = self.validation_fraction, self.test_fraction
        return item.split or split_of(document.key, *fractions)


@dataclass
class Tokenized:
    """What the tokenizing stage made.

    Attributes:
      stores: prefix of each part's token store.
      num_documents: of each part.
      inputs: the manifest's entries.
      num_tokens: in all, without end-of-text.
    """

    stores: dict[Part, Path] = field(default_factory=dict)
    num_documents: dict[Part, int] = field(default_factory=dict)
    inputs: list[dict[str, Any]] = field(default_factory=list)
    num_tokens: int = 0


def training_texts(
    inputs: list[InputFile], split: Split, say: Callable[[str], None]
) -> Iterator[str]:
    """Yields what a tokenizer is trained on: the train split, up to a limit that is said.

    Args:
      inputs: files.
      split: of documents.
      say: is handed messages.
    """
    num_characters = 0
    for item in inputs:
        for document in read_documents(item.path, ReadCounts()):
            if split.of(item, document) != "train":
                continue
            if num_characters > _TRAINING_CHARACTERS:
                say(f"  the tokenizer sees the first {num_characters:,} characters only")
                return
            num_characters += len(document.text)
            yield document.text


def tokenize_inputs(
    inputs: list[InputFile],
    split: Split,
    tokenizer: Tokenizer,
    folder: Path,
    say: Callable[[str], None],
) -> Tokenized:
    """Writes FOLDER/tokens/, a token store for each split and source.

    Args:
      inputs: files.
      split: of documents.
      tokenizer: for all of them.
      folder: of the data.
      say: is handed messages.

    Raises:
      UserError: a file or a record of it is unfit.
    """
    start = time.perf_counter()
    (folder / STORE_FOLDER).mkdir()
    result, writers = Tokenized(), dict[Part, TokenStoreWriter]()
    checked = False
    for item in inputs:
        counts = ReadCounts()
        for batch in _batches(read_documents(item.path, counts)):
            texts = [document.text for document in batch]
            if not checked and (warning := tokenizer.check_fast_encoder(texts)):
                say(f"  warning: {warning}")
            checked = True
            encoded = tokenizer.encode_batch(texts, num_threads=num_cores())
            for document, ids in zip(batch, encoded, strict=True):
                part = split.of(item, document), document.source
                if part not in writers:
                    result.stores[part] = _store_prefix(folder, *part)
                    result.num_documents[part] = 0
                    writers[part] = TokenStoreWriter(
                        result.stores[part], tokenizer.dtype, tokenizer.end_of_text_id
                    )
                writers[part].add(ids, document.key)
                result.num_documents[part] += 1
                result.num_tokens += len(ids)
        result.inputs.append(_input_entry(item, counts))
        for reason, count in [*counts.skipped.items(), *counts.changed.items()]:
            say(f"  {item.name}: {count:,} documents: {reason}")
    for writer in writers.values():
        writer.close()
    say(
        f"  {result.num_tokens:,} tokens of {sum(result.num_documents.values()):,} documents "
        f"({time.perf_counter() - start:.1f} s)"
    )
    return result


def _input_entry(item: InputFile, counts: ReadCounts) -> dict[str, Any]:
    digest = digest_file(item.path)
    return {
        "path": item.name,
        "bytes": digest.num_bytes,
        "sha256": digest.sha256,
        "documents": counts.documents,
        "skipped": dict(counts.skipped),
        "changed": dict(counts.changed),
    }


def _store_prefix(folder: Path, split: str, source: str) -> Path:
    # A source's name may hold anything; the hash keeps names apart that come out alike.
    name = "".join(c if c.isascii() and c.isalnum() else "_" for c in source)[:40]
    suffix = blake2b(source.encode(), digest_size=3).hexdigest()
    return folder / STORE_FOLDER / f"{split}.{name}-{suffix}"


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Groups documents, so that each group is worth several threads."""
    batch: list[Document] = []
    num_characters = 0
    for document in documents:
        batch.append(document)
        num_characters += len(document.text)
        if num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def num_cores() -> int:
    """Returns how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
