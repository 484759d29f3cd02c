"""Input files to documents: one reader for every form that records come in."""

import contextlib
import os
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from data_pipeline.chat import to_documents
from data_pipeline.codecs import (
    ByteReader,
    ForwardFile,
    Meter,
    check_is_no_pointer,
    codec_of,
    decompress,
    line_blocks,
    open_binary,
    split_lines,
)
from data_pipeline.document_batch import DocumentBatch, grouped, joined, plain_batch, wanted
from data_pipeline.documents import (
    BadRecord,
    Document,
    Filters,
    ReadCounts,
    filtered,
    parse_json,
)
from data_pipeline.input_files import InputFile, suffix_form
from data_pipeline.json_arrays import BYTE_ORDER_MARK, array_records, beginning, is_array
from tfbig.errors import UserError

_READ_BY_LIBRARIES = ("parquet", "zip")  # files whose bytes we don't see
_DAT_LENGTH_DIGITS = 16  # lm_dataformat's DAT archives: a decimal length, then so many bytes


@dataclass(frozen=True)
class Piece:
    """A part of an input that one worker reads.

    Args:
      number: of the input file.
      start: first byte, row group, example or document.
      stop: what comes after the last one; -1 means the end.
      first_record: number of its first line or record, for messages.
      part: file that holds it recoded, relative to the data folder; "" means the input itself.
      in_array: whether it begins behind a comma of a .json file that is one array.
    """

    number: int
    start: int = 0
    stop: int = -1
    first_record: int = 1
    part: str = ""
    in_array: bool = False

    def to_json(self) -> dict[str, Any]:
        """Returns what Piece(**values) takes."""
        return asdict(self)

    @property
    def is_whole(self) -> bool:
        """Whether it is all of a file."""
        return self.start == 0 and self.stop < 0 and not self.part


_WHOLE = Piece(0)  # of a file that stands in another


class PieceReader:
    """Iterates over the documents of one piece.

    Args:
      item: the input file.
      piece: of it.
      counts: is added to.
      folder: of the data, which recoded parts lie in.

    Attributes:
      num_bytes: stored bytes read so far; of what a library reads, the records' share.
      sha256: of the whole file, once a whole piece has been read, or the first one of a file that
        a library reads; else "".
    """

    def __init__(self, item: InputFile, piece: Piece, counts: ReadCounts, folder: str = "") -> None:
        self._item, self._piece, self._counts = item, piece, counts
        path = os.path.join(folder, piece.part) if piece.part else item.path
        start, stop = (0, -1) if piece.part else (piece.start, piece.stop)
        self._path, self._codec = path, ".zst" if piece.part else item.codec
        self._bytes, self._meter = ByteReader(path, start, stop), Meter()
        # Only a .json file's beginning says what it is: a line behind it may be an array, too.
        is_lines = item.form == "json" and piece.first_record > 1 and not piece.in_array
        self._form = "lines" if is_lines else item.form
        self.sha256 = ""

    @property
    def num_bytes(self) -> int:
        return self._bytes.num_bytes + self._meter.num_bytes

    def __iter__(self) -> Iterator[Document]:
        yield from self._documents(self._records())
        self._hash()

    def batches(self, filters: Filters) -> Iterator[DocumentBatch]:
        """Yields the documents that are wanted, as iterating and `filtered` do, in columns."""
        yield from joined(self._parts(filters))
        self._hash()

    def _parts(self, filters: Filters) -> Iterator[DocumentBatch]:
        item, piece, counts = self._item, self._piece, self._counts
        if self._form != "lines":
            yield from grouped(filtered(self._documents(self._records()), filters, counts))
            return
        number, fits = piece.first_record, not (item.format.has_prompts or item.format.chat)
        for lines in line_blocks(self._contents()):
            batch = plain_batch(lines, item.format) if fits else None
            if batch is None:
                one_by_one = self._documents(_line_records(lines, number))
                batch = DocumentBatch.of(list(filtered(one_by_one, filters, counts)))
            else:
                counts.documents += len(batch.texts)
                batch = wanted(batch, filters, counts)
            number += len(lines)
            yield batch

    def _documents(self, records: Iterable[tuple[str, Any]]) -> Iterator[Document]:
        counts, item = self._counts, self._item
        may_be_too_long = item.format.has_prompts or bool(item.format.chat)  # for a row
        for place, value in records:
            try:
                if isinstance(value, BadRecord):
                    raise value
                documents = to_documents(value, item.format, counts)
            except BadRecord as problem:
                counts.reject(item.name, place, problem)
                continue
            for document in documents:
                counts.documents += 1
                yield document._replace(place=place) if may_be_too_long else document

    def _hash(self) -> None:
        item = self._item
        if self._piece.is_whole and item.form not in (*_READ_BY_LIBRARIES, "tfds"):
            self.sha256 = self._bytes.sha256
        elif self._piece.start == 0 and not self._piece.part and item.form in _READ_BY_LIBRARIES:
            reader = ByteReader(item.path)
            for _ in reader:
                pass
            self.sha256 = reader.sha256

    def _records(self) -> Iterator[tuple[str, Any]]:
        """Yields (place, parsed record or what is wrong with it)."""
        item, piece = self._item, self._piece
        if item.form == "parquet":
            from data_pipeline.parquet_source import parquet_records

            yield from parquet_records(item, piece.start, piece.stop, self._meter)
        elif item.form == "tfds":
            from data_pipeline.tfds_source import tfds_records

            yield from tfds_records(item, piece.start, piece.stop, self._meter)
        elif item.form == "zip":
            yield from _zip_records(item, piece.start, piece.stop, self._meter)
        else:
            yield from _stream_records(self._form, self._contents(), item, piece)

    def _contents(self) -> Iterator[bytes]:
        return decompress(iter(self._bytes), self._codec, self._item.name)


def _stream_records(
    form: str, chunks: Iterator[bytes], item: InputFile, piece: Piece = _WHOLE
) -> Iterator[tuple[str, Any]]:
    if form == "lines":
        yield from _line_records(split_lines(chunks), piece.first_record)
    elif form == "json":
        yield from _json_records(chunks, item, piece)
    elif form == "text":
        yield "", _decoded(b"".join(chunks))
    elif form == "lengths":
        for number, (_, data) in enumerate(length_prefixed(chunks, item.name), piece.first_record):
            yield f"record {number}", _decoded(data)
    elif form == "tar":
        yield from _tar_records(chunks, item)
    else:
        raise AssertionError(form)


def _line_records(lines: Iterable[bytes], first_record: int) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(lines, first_record):
        if number == 1 and line.startswith(BYTE_ORDER_MARK):
            line = line[len(BYTE_ORDER_MARK) :]
        try:
            yield f"line {number}", orjson.loads(line)
        except orjson.JSONDecodeError:
            if line.strip():
                yield f"line {number}", _parsed(line)


def _parsed(line: bytes) -> Any:
    try:
        return parse_json(line)
    except BadRecord as problem:
        return problem


def _json_records(
    chunks: Iterator[bytes], item: InputFile, piece: Piece
) -> Iterator[tuple[str, Any]]:
    """Yields the records of a .json file, which may be one array, or hold a record a line."""
    name, first = item.name, piece.first_record
    if piece.in_array:
        yield from array_records(chunks, name, first, in_array=True, is_part=True)
        return
    start = beginning(chunks)
    everything = _chained(start, chunks)
    if is_array(start):
        is_part = not piece.is_whole
        yield from array_records(everything, name, first, in_array=False, is_part=is_part)
    else:
        yield from _line_records(split_lines(everything), first)


def _chained(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest


def length_prefixed(chunks: Iterator[bytes], name: str) -> Iterator[tuple[bytes, bytes]]:
    """Yields the length, as it is written, and the text of each record of an archive of texts.

    Raises:
      UserError: it is cut short, or no such archive.
    """
    file, number = ForwardFile(chunks), 0
    while header := file.read(_DAT_LENGTH_DIGITS):
        number += 1
        if len(header) < _DAT_LENGTH_DIGITS or not header.isdigit():
            raise UserError(f"{name} record {number} does not begin with a length of 16 digits.")
        data = file.read(int(header))
        if len(data) < int(header):
            raise UserError(f"{name} is cut short within record {number}.")
        yield header, data


def _decoded(data: bytes) -> str | BadRecord:
    """Returns a text file's contents, or what is wrong with them."""
    if b"\0" in data[:8192]:
        return BadRecord("holds NUL bytes: it is no text file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return BadRecord("is not UTF-8", f" at byte {error.start}")


def _tar_records(chunks: Iterator[bytes], item: InputFile) -> Iterator[tuple[str, Any]]:
    """Yields what the members of an archive hold; a member of no known kind is one text."""
    with intact_tar(item.name):
        for member, file in tar_members(chunks, item):
            yield from _member_records(member.name, file, item)


@contextlib.contextmanager
def intact_tar(name: str) -> Iterator[None]:
    """Says in one line what is wrong with an archive whose members are read in the block."""
    try:
        yield
    except tarfile.TarError as error:
        raise UserError(f"{name} is no intact tar archive: {error}") from None


def tar_members(chunks: Iterator[bytes], item: InputFile) -> Iterator[tuple[tarfile.TarInfo, Any]]:
    """Yields the members of an archive that are files, with what they are read from, in turn.

    Raises:
      UserError: it is cut short behind the last member.
      tarfile.TarError: it is damaged.
    """
    stream = ForwardFile(chunks)
    with tarfile.open(fileobj=stream, mode="r|") as archive:  # type: ignore[call-overload]
        for member in archive:
            file = archive.extractfile(member) if member.isfile() else None
            if file is not None:
                yield member, file
    while stream.read(1 << 18):
        pass
    if stream.last.strip(b"\0") or len(stream.last) < 1024:  # two empty blocks end an archive
        raise UserError(f"{item.name} is cut short: it has no end-of-archive mark.")


def _zip_records(item: InputFile, start: int, stop: int, meter: Meter) -> Iterator[tuple[str, Any]]:
    """Yields what members [start, stop) of an archive hold; -1 means all that follow."""
    name, done = item.name, 0
    try:
        with _opened_zip(item) as archive:
            members = archive.infolist()
            for member in members[start : len(members) if stop < 0 else stop]:
                if member.is_dir():
                    continue
                with archive.open(member) as file:
                    for record in _member_records(member.filename, file, item):
                        share = member.compress_size * file.tell() // max(1, member.file_size)
                        meter.num_bytes = done + share
                        yield record
                done += member.compress_size
                meter.num_bytes = done
    # NotImplementedError is zipfile's for a compression or encryption that it does not know.
    except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
        raise UserError(f"{name} is no intact zip archive: {error}") from None


@contextlib.contextmanager
def _opened_zip(item: InputFile) -> Iterator[zipfile.ZipFile]:
    with open_binary(item.path) as opened:
        check_is_no_pointer(opened.read(64), item.name)
    with open_binary(item.path) as opened, zipfile.ZipFile(opened) as archive:
        yield archive


def zip_member_ranges(item: InputFile, chunk_bytes: int) -> list[tuple[int, int]]:
    """Returns ranges of an archive's members, each of about `chunk_bytes` or of one member."""
    try:
        with _opened_zip(item) as archive:
            sizes = [member.file_size for member in archive.infolist()]
    except zipfile.BadZipFile:
        return [(0, -1)]  # whoever reads it says so
    ranges, start, size = [], 0, 0
    for number, num_bytes in enumerate(sizes, 1):
        size += num_bytes
        if size >= chunk_bytes or number == len(sizes):
            ranges.append((start, number))
            start, size = number, 0
    return ranges or [(0, -1)]


def _member_records(member: str, file: Any, item: InputFile) -> Iterator[tuple[str, Any]]:
    form = suffix_form(member) or "text"
    if form in ("tar", "zip", "parquet"):
        raise UserError(f"{item.name} holds {member}, an archive in an archive: unpack it.")
    chunks = iter(lambda: file.read(1 << 18), b"")
    inside = decompress(chunks, codec_of(member), f"{item.name} member {member}")
    for place, value in _stream_records(form, inside, item):
        yield f"member {member} {place}".rstrip(), value


def read_documents(
    item: InputFile | str | os.PathLike[str], counts: ReadCounts
) -> Iterator[Document]:
    """Yields the documents of one whole file.

    Args:
      item: a file; of a bare path the form is told from its name.
      counts: is added to.

    Raises:
      UserError: the file is damaged or cut short, or holds more unfit records than are borne.
    """
    if not isinstance(item, InputFile):
        name = os.fspath(item)
        item = InputFile(name, name, suffix_form(name))
    return iter(PieceReader(item, Piece(0), counts))
