"""Records to documents: fields, validation, filters, and an account of everything not taken."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import orjson

from data_pipeline.input_files import UNNAMED_SOURCE, RecordFormat
from tfbig.errors import UserError

DOCUMENT_HASH = "sha256"  # splits, order and duplicates depend on it
_PATIENCE = 1000  # records of a chunk after which hopeless input is given up early
_HOPELESS = 0.5  # share of bad records that no fraction a user means reaches by accident
# The Pile's replication code names some sets otherwise than the release does.
_PILE_ALIASES = {
    "Bibliotik": "Books3",
    "BookCorpus": "BookCorpus2",
    "CommonCrawl": "Pile-CC",
    "USPTO": "USPTO Backgrounds",
}
SPLITS = ("validation", "test", "train")
SURROGATE = "lone surrogate replaced by U+FFFD"


class Digest(NamedTuple):
    """128 bits of a document's contents, in two halves."""

    key: int  # uint64: decides its split and its place in the shuffle
    check: int  # uint64: with `key` it tells equal documents


class Document(NamedTuple):
    """One text, or one text that is learned after another that is only read."""

    text: str
    data: bytes  # the text in UTF-8
    source: str
    digest: Digest
    prompt: str = ""
    place: str = ""  # of its record, where one may yet turn out to be unfit


class BadRecord(Exception):
    """A record is unfit.

    Args:
      reason: the same words for all records of its kind; they are counted by it.
      detail: what else helps.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason + detail)
        self.reason, self.detail = reason, detail


def excluded(source: str) -> str:
    """Returns the reason that documents of an excluded source are counted by."""
    return f"filtered: of {source}"


@dataclass(frozen=True)
class Filters:
    """Which documents are wanted.

    Args:
      min_characters: shorter texts are left out.
      max_characters: longer texts are left out; 0 means no limit.
      excluded_sources: names of sources that are left out.
    """

    min_characters: int = 0
    max_characters: int = 0
    excluded_sources: tuple[str, ...] = ()

    @property
    def take_all(self) -> bool:
        """Whether no document is left out."""
        return self == Filters()

    def objection(self, num_characters: int, source: str) -> str:
        """Returns why a document is left out, "" when it is not.

        Args:
          num_characters: of its text and its prompt.
          source: its source's name.
        """
        if num_characters < self.min_characters:
            return f"filtered: shorter than {self.min_characters} characters"
        if self.max_characters and num_characters > self.max_characters:
            return f"filtered: longer than {self.max_characters} characters"
        if source in self.excluded_sources:
            return excluded(source)
        return ""


@dataclass
class ReadCounts:
    """What was read, and what was not taken as it was.

    Attributes:
      may_be_bad: share of bad records that is borne; the first one ends the reading at 0.
      documents: texts read.
      skipped: records left out as asked or because there is nothing in them, by reason.
      changed: texts altered, by reason.
      bad: unfit records, by reason.
      bad_records: file, place and reason of each unfit record.
    """

    may_be_bad: float = 0.0
    documents: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)
    bad_records: list[tuple[str, str, str]] = field(default_factory=list)

    def first_bad(self) -> str:
        """Returns a sentence about the first unfit record, "" where there is none."""
        if not self.bad_records:
            return ""
        name, place, reason = self.bad_records[0]
        return f" The first of {len(self.bad_records):,} unfit records: {name} {place} {reason}."

    def reject(self, name: str, place: str, problem: BadRecord) -> None:
        """Counts an unfit record, or ends the reading.

        Raises:
          UserError: none is borne, or most records are unfit.
        """
        where = f"{name} {place}".rstrip()
        if not self.may_be_bad:
            raise UserError(
                f"{where} {problem}. Mend it, or bear some: --max_bad_fraction=0.001 leaves bad "
                "records out and lists them."
            )
        self.bad[problem.reason] += 1
        self.bad_records.append((name, place, str(problem)))
        num_bad = sum(self.bad.values())
        limit = max(_HOPELESS, self.may_be_bad)
        if num_bad + self.documents >= _PATIENCE and num_bad > limit * (num_bad + self.documents):
            raise UserError(
                f"{where} {problem}, as do {num_bad:,} of {num_bad + self.documents:,} records "
                "so far: is it the right --source and --text_field?"
            )


def digest_of(data: bytes) -> Digest:
    """Returns a hash that depends on the contents alone, not on where or when they are read."""
    found = sha256(data).digest()  # processors have instructions for it: twice blake2b's rate
    return Digest(int.from_bytes(found[:8], "little"), int.from_bytes(found[8:16], "little"))


def document_key(text: str) -> int:
    """Returns a uint64 that depends on the text alone."""
    return digest_of(text.encode()).key


def split_of(key: int, validation_fraction: float, test_fraction: float) -> str:
    """Returns the split of a document; equal texts are always in the same one."""
    found = splits_of(np.array([key], np.uint64), validation_fraction, test_fraction)
    return SPLITS[int(found[0])]


def splits_of(keys: np.ndarray, validation_fraction: float, test_fraction: float) -> np.ndarray:
    """Returns the split of each of keys (n,) uint64, as an index into SPLITS."""
    places = keys / 2.0**64
    edges = validation_fraction, validation_fraction + test_fraction
    return np.searchsorted(edges, places, side="right")  # (n,)


def parse_json(line: bytes) -> Any:
    """Returns the value of a line.

    Raises:
      BadRecord: it is no JSON.
    """
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        try:  # accepts lone surrogates and NaN, which orjson does not
            # Of bytes json would take NULs for signs of UTF-16: a cut text could pass as another.
            return json.loads(line.decode("utf-8-sig", "surrogatepass"))
        except (ValueError, RecursionError) as error:
            raise BadRecord("is not valid JSON", f": {error}") from None


def to_document(value: Any, record_format: RecordFormat, counts: ReadCounts) -> Document | None:
    """Returns a record's document; None, counted, when there is nothing in it.

    Args:
      value: a parsed record: an object with the format's fields, or a bare string.
      record_format: which fields.
      counts: is added to.

    Raises:
      BadRecord: the record is unfit.
    """
    prompt = ""
    if record_format.has_prompts:
        prompt = _text_of(value, record_format.prompt or "prompt")
        text = _text_of(value, record_format.completion or "completion")
    else:
        text = value if isinstance(value, str) else _text_of(value, record_format.text)
    if not text:
        counts.skipped["empty text"] += 1
        return None
    text, data = encoded(text, counts)
    digest_data = data
    if prompt:
        prompt, prompt_data = encoded(prompt, counts)
        digest_data = b"%d:" % len(prompt_data) + prompt_data + data
    return Document(text, data, source_of(value, record_format), digest_of(digest_data), prompt)


@lru_cache(maxsize=64)
def _names_of(path: str) -> tuple[str, ...]:
    return tuple(path.split("."))


def _field(value: Any, path: str) -> Any:
    for name in _names_of(path):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _text_of(value: Any, path: str) -> str:
    if isinstance(value, dict) and isinstance(found := value.get(path), str):  # nearly always
        return found
    if not isinstance(value, dict) or (path not in value and _field(value, path) is None):
        parent = _field(value, path.rpartition(".")[0]) if "." in path else value
        if not (isinstance(parent, dict) and path.rpartition(".")[2] in parent):
            raise BadRecord(f'has no field "{path}"')
    found = value[path] if path in value else _field(value, path)
    if isinstance(found, list) and all(isinstance(part, str) for part in found):
        return "\n\n".join(found)  # as lm_dataformat joins a list of texts
    if not isinstance(found, str):
        raise BadRecord(f"has a text that is {type(found).__name__}, not a string")
    return found


def source_of(value: Any, record_format: RecordFormat) -> str:
    """Returns the source of a record."""
    found = _field(value, record_format.source) if record_format.source else None
    return known_source(found, record_format)


def known_source(found: Any, record_format: RecordFormat) -> str:
    """Returns the source of a record that has `found` in the field of its source."""
    if isinstance(found, str) and found:
        is_pile = record_format.source == RecordFormat.source
        return _PILE_ALIASES.get(found, found) if is_pile else found
    return record_format.name or UNNAMED_SOURCE


def encoded(text: str, counts: ReadCounts) -> tuple[str, bytes]:
    """Returns a text and its UTF-8; lone surrogates, which have none, are replaced and counted."""
    try:
        return text, text.encode()
    except UnicodeEncodeError:
        # Pairs written as two escapes are joined, what remains alone is no character.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        counts.changed[SURROGATE] += 1
        return text, text.encode()


def filtered(
    documents: Iterator[Document], filters: Filters, counts: ReadCounts
) -> Iterator[Document]:
    """Yields the documents that are wanted; the others are counted as skipped."""
    for document in documents:
        size = len(document.text) + len(document.prompt)
        objection = filters.objection(size, document.source)
        if objection:
            counts.skipped[objection] += 1
            counts.documents -= 1
        else:
            yield document
