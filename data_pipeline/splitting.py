"""Large inputs that are read from their beginning alone, cut into pieces that are read apart."""

import os
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import zstandard

from data_pipeline.codecs import ByteReader, decompress, split_lines
from data_pipeline.input_files import InputFile
from data_pipeline.json_arrays import array_units, begins_an_array
from data_pipeline.plan import Plan, is_recoded
from data_pipeline.reading import Piece, intact_tar, length_prefixed, tar_members
from data_pipeline.work import FOLDER, Result, WorkFolder

_ARRAY = "array"  # form of a .json file that is one
_PART_BYTES = 1 << 23  # contents of one zstd frame of a recoded part
_BLOCK_BYTES = 1 << 18  # of an archive's member that are read at a time
_END_OF_TAR = b"\0" * (2 * tarfile.BLOCKSIZE)

# Bytes of a file and how many records end with them: it may be cut behind those where one does.
Unit = tuple[bytes, int]


def split_input(plan: Plan, item_name: str, folder: Path, work: WorkFolder) -> Result:
    """Cuts a large file into pieces that are read apart.

    Plain files are only measured; compressed ones, which are read from their beginning alone, and
    archives are recoded in parts with checksums.

    Returns:
      {"pieces": ..., "sha256": of the file, "bytes": of the file}.
    """
    number = plan.large_inputs()[item_name]
    item, chunk_bytes = plan.inputs[number], plan.config.chunk_bytes
    if item.form == "json":
        reader = ByteReader(item.path)
        if begins_an_array(decompress(iter(reader), item.codec, item.name)):
            item = replace(item, form=_ARRAY)
    reader = ByteReader(item.path)
    if is_recoded(item):
        pieces = _recode(item, item_name, number, reader, folder, chunk_bytes, work)
    elif item.form in ("lengths", _ARRAY):
        pieces = _measure_units(item, number, reader, chunk_bytes, work)
    else:
        pieces = _measure_lines(number, reader, chunk_bytes, work)
    return {
        "pieces": [piece.to_json() for piece in pieces],
        "sha256": reader.sha256,
        "bytes": reader.num_bytes,
    }


def _measure_lines(
    number: int, reader: ByteReader, chunk_bytes: int, work: WorkFolder
) -> list[Piece]:
    """Returns ranges of bytes that begin and end with lines."""
    pieces: list[Piece] = []
    start = at = 0  # of the piece, of the chunk that was read
    first = line = 1  # numbers of the piece's first line and of the next one
    for chunk in reader:
        counted, end = 0, 0
        while end >= 0:
            end = chunk.find(b"\n", max(0, start + chunk_bytes - 1 - at))
            if end >= 0:
                line += chunk.count(b"\n", counted, end + 1)
                counted = end + 1
                pieces.append(Piece(number, start, at + counted, first))
                start, first = at + counted, line
        line += chunk.count(b"\n", counted)
        at += len(chunk)
        work.progress = at
    if at > start or not pieces:
        pieces.append(Piece(number, start, at, first))
    return pieces


def _measure_units(
    item: InputFile, number: int, reader: ByteReader, chunk_bytes: int, work: WorkFolder
) -> list[Piece]:
    """Returns ranges of bytes that begin and end with units."""
    pieces: list[Piece] = []
    start = at = 0
    first = record = 1
    for data, ends in _units(item, reader):
        at, record = at + len(data), record + ends
        if ends and at - start >= chunk_bytes:
            pieces.append(Piece(number, start, at, first, "", _in_array(item, first)))
            start, first = at, record
        work.progress = at
    if at > start or not pieces:
        pieces.append(Piece(number, start, at, first, "", _in_array(item, first)))
    return pieces


def _in_array(item: InputFile, first_record: int) -> bool:
    return item.form == _ARRAY and first_record > 1


def _recode(
    item: InputFile,
    name: str,
    number: int,
    reader: ByteReader,
    folder: Path,
    chunk_bytes: int,
    work: WorkFolder,
) -> list[Piece]:
    """Writes parts of about `chunk_bytes` each, as zstd frames with checksums."""
    pieces: list[Piece] = []
    units = _units(item, reader)
    first, unit = 1, next(units, None)
    while unit is not None or not pieces:
        part = f"{FOLDER}/{name}-{len(pieces):05d}.zst"
        temporary = work.temporary(name)
        compressor = zstandard.ZstdCompressor(level=1, write_checksum=True)
        last, size, ends = first, 0, 1
        with open(temporary, "wb") as file:
            while unit is not None and not (ends and size >= chunk_bytes):
                waiting, room = [], 0
                while unit is not None and room < _PART_BYTES:
                    data, ends = unit
                    waiting.append(data)
                    room, last = room + len(data), last + ends
                    unit = next(units, None)
                    if ends and size + room >= chunk_bytes:
                        break
                file.write(compressor.compress(b"".join(waiting)))
                size += room
                work.progress = reader.num_bytes
            if item.form == "tar":
                file.write(compressor.compress(_END_OF_TAR))
            elif not size:
                file.write(compressor.compress(b""))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / part)
        pieces.append(Piece(number, 0, -1, first, part, _in_array(item, first)))
        first = last
    return pieces


def _units(item: InputFile, reader: ByteReader) -> Iterator[Unit]:
    """Yields what a file's parts are made of; but for tar it is the file, byte by byte."""
    contents = decompress(iter(reader), item.codec, item.name)
    if item.form == "lengths":
        for header, data in length_prefixed(contents, item.name):
            yield header, 0
            yield data, 1
    elif item.form == _ARRAY:
        for data, _ in array_units(contents, item.name):
            yield data, 1
    elif item.form == "tar":
        with intact_tar(item.name):
            for member, file in tar_members(contents, item):
                # Not the member itself: a sparse one, say, is whole from here on.
                plain = tarfile.TarInfo(member.name)
                plain.size = member.size
                yield plain.tobuf(tarfile.PAX_FORMAT), 0
                while block := file.read(_BLOCK_BYTES):
                    yield block, 0
                yield b"\0" * (-member.size % tarfile.BLOCKSIZE), 1
    else:
        for line in split_lines(contents):
            yield line + b"\n", 1
