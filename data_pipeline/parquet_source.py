"""Parquet files of documents, as FineWeb's; needs the extra `parquet` (pyarrow)."""

import io
from collections.abc import Iterator
from typing import Any

from data_pipeline.codecs import Meter, RemoteFile, check_is_no_pointer, is_remote, open_binary
from data_pipeline.input_files import InputFile
from tfbig.errors import UserError

_BATCH_ROWS = 1024


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            "reading .parquet needs pyarrow: python -m pip install 'tfbig[parquet]'"
        ) from None
    return pyarrow


def _open(item: InputFile) -> Any:
    pyarrow = _pyarrow()
    try:
        remote = is_remote(item.path)
        source = io.BufferedReader(RemoteFile(item.path)) if remote else item.path
        return pyarrow.parquet.ParquetFile(source)
    except (pyarrow.ArrowException, OSError) as error:
        with open_binary(item.path) as file:
            check_is_no_pointer(file.read(64), item.name)
        why = str(error).splitlines()[0]
        raise UserError(f"{item.name} is no intact parquet file: {why}") from None


def row_group_ranges(item: InputFile, chunk_bytes: int) -> list[tuple[int, int]]:
    """Returns ranges of row groups, each of about `chunk_bytes` uncompressed or one group."""
    metadata = _open(item).metadata
    ranges, start, size = [], 0, 0
    for group in range(metadata.num_row_groups):
        size += metadata.row_group(group).total_byte_size
        if size >= chunk_bytes or group + 1 == metadata.num_row_groups:
            ranges.append((start, group + 1))
            start, size = group + 1, 0
    return ranges or [(0, 0)]


def parquet_records(
    item: InputFile, start: int, stop: int, meter: Meter
) -> Iterator[tuple[str, Any]]:
    """Yields (place, record) of row groups [start, stop).

    Args:
      item: the file.
      start: first row group.
      stop: row group after the last; -1 means all that follow.
      meter: is set to these rows' share of the file.

    Raises:
      UserError: the file is damaged or lacks a column.
    """
    file, pyarrow = _open(item), _pyarrow()
    record_format = item.format
    fields = [record_format.text, record_format.source, record_format.prompt]
    if record_format.has_prompts:
        fields = [record_format.prompt, record_format.completion, record_format.source]
    if record_format.chat:
        fields = [record_format.chat, record_format.source]
    tops = {field.partition(".")[0] for field in fields if field}
    known = file.schema_arrow.names
    required = record_format.chat or record_format.completion or record_format.text
    if required.partition(".")[0] not in known:
        raise UserError(
            f'{item.name} has no column "{required}"; it has {", ".join(known)}: name one with '
            "--text_field."
        )
    groups = list(range(start, file.metadata.num_row_groups if stop < 0 else stop))
    number = first = 1 + sum(file.metadata.row_group(group).num_rows for group in range(start))
    try:
        columns = [name for name in known if name in tops]
        for batch in file.iter_batches(_BATCH_ROWS, row_groups=groups, columns=columns):
            for record in batch.to_pylist():
                meter.num_bytes = item.num_bytes * (number + 1 - first) // file.metadata.num_rows
                yield f"row {number}", record
                number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{item.name} is damaged near row {number}: {error}") from None
