"""Documents in columns: what costs Python's time once a document is done here once a batch."""

from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import orjson

from data_pipeline.documents import Document, Filters, ReadCounts, known_source
from data_pipeline.input_files import RecordFormat

_BATCH_CHARACTERS = 1 << 22  # text that is encoded at a time: worth several threads
_GROUP_CHARACTERS = 1 << 18  # text whose columns are made at a time


class DocumentBatch(NamedTuple):
    """Documents, one entry each in every column; the last two are empty where none has any."""

    texts: list[str]
    data: list[bytes]  # the texts in UTF-8
    sources: list[str]
    keys: np.ndarray  # (n,) uint64
    checks: np.ndarray  # (n,) uint64
    prompts: list[str]
    places: list[str]  # of their records in the file

    @classmethod
    def of(cls, documents: Sequence[Document]) -> "DocumentBatch":
        """Returns documents in columns."""
        digests = np.array([document.digest for document in documents], np.uint64).reshape(-1, 2)
        prompts = [document.prompt for document in documents]
        places = [document.place for document in documents]
        return cls(
            [document.text for document in documents],
            [document.data for document in documents],
            [document.source for document in documents],
            digests[:, 0],
            digests[:, 1],
            prompts if any(prompts) else [],
            places if any(places) else [],
        )

    def chosen(self, kept: np.ndarray) -> "DocumentBatch":
        """Returns the documents of which `kept`, (n,) bool, says so."""
        places = np.flatnonzero(kept).tolist()

        def of(column: list[Any]) -> list[Any]:
            return [column[place] for place in places] if column else []

        lists = of(self.texts), of(self.data), of(self.sources)
        columns = of(self.prompts), of(self.places)
        return DocumentBatch(*lists, self.keys[kept], self.checks[kept], *columns)


def plain_batch(lines: Sequence[bytes], record_format: RecordFormat) -> DocumentBatch | None:
    """Returns the documents of lines that are all plain records; None where one is anything else.

    A plain record is a JSON object with a text that is a string and not empty, as nearly all are.
    None counts nothing and changes nothing: such lines are gone through one by one, to the same
    documents.

    Args:
      lines: without their ends.
      record_format: without prompts and conversations.
    """
    if "." in record_format.text:
        return None
    try:
        values = list(map(orjson.loads, lines))
        texts = [value[record_format.text] for value in values]
        data = list(map(str.encode, texts))
    except (orjson.JSONDecodeError, TypeError, KeyError):
        return None
    if not all(texts):
        return None
    digests = np.frombuffer(b"".join([sha256(item).digest() for item in data]), "<u8")
    digests = digests.reshape(-1, 4)  # (n, 4): documents.digest_of takes the first two
    return DocumentBatch(
        texts, data, _sources(values, record_format), digests[:, 0], digests[:, 1], [], []
    )


def _sources(values: Sequence[dict[str, Any]], record_format: RecordFormat) -> list[str]:
    """Returns what documents.source_of says of each record."""
    column: list[Any] = list(values)
    if not record_format.source:
        return [known_source(None, record_format)] * len(column)
    for name in record_format.source.split("."):
        try:
            column = [value[name] for value in column]
        except (TypeError, KeyError):
            column = [value.get(name) if isinstance(value, dict) else None for value in column]
    try:
        names = {found: known_source(found, record_format) for found in set(column)}
    except TypeError:  # a list or an object, which names nothing
        return [known_source(found, record_format) for found in column]
    return [names[found] for found in column]


def wanted(batch: DocumentBatch, filters: Filters, counts: ReadCounts) -> DocumentBatch:
    """Returns the documents that are wanted; the others are counted as skipped."""
    if filters.take_all:
        return batch
    sizes = map(len, batch.texts)
    objections = [
        filters.objection(size, source) for size, source in zip(sizes, batch.sources, strict=True)
    ]
    for objection in filter(None, objections):
        counts.skipped[objection] += 1
        counts.documents -= 1
    return batch.chosen(np.array([not objection for objection in objections], bool))


def grouped(documents: Iterable[Document]) -> Iterator[DocumentBatch]:
    """Yields documents in columns, several together."""
    group: list[Document] = []
    num_characters = 0
    for document in documents:
        group.append(document)
        num_characters += len(document.text)
        if num_characters >= _GROUP_CHARACTERS:
            yield DocumentBatch.of(group)
            group, num_characters = [], 0
    if group:
        yield DocumentBatch.of(group)


def joined(batches: Iterator[DocumentBatch]) -> Iterator[DocumentBatch]:
    """Groups batches, so that each group is worth several threads."""
    waiting: list[DocumentBatch] = []
    num_characters = 0
    for batch in batches:
        waiting.append(batch)
        num_characters += sum(map(len, batch.texts))
        if num_characters >= _BATCH_CHARACTERS:
            yield _concatenated(waiting)
            waiting, num_characters = [], 0
    if num_characters:
        yield _concatenated(waiting)


def _concatenated(batches: Sequence[DocumentBatch]) -> DocumentBatch:
    if len(batches) == 1:
        return batches[0]

    def of_all(columns: Sequence[list[str]]) -> list[str]:
        pairs = zip(batches, columns, strict=True)
        filled = [column or [""] * len(batch.texts) for batch, column in pairs]
        return list(chain.from_iterable(filled)) if any(columns) else []

    return DocumentBatch(
        list(chain.from_iterable(batch.texts for batch in batches)),
        list(chain.from_iterable(batch.data for batch in batches)),
        list(chain.from_iterable(batch.sources for batch in batches)),
        np.concatenate([batch.keys for batch in batches]),
        np.concatenate([batch.checks for batch in batches]),
        of_all([batch.prompts for batch in batches]),
        of_all([batch.places for batch in batches]),
    )
