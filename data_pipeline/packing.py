"""Documents to rows: joined and cut, or fitted whole into padded rows.

The stream of a part is its documents in shuffled order, each with its end-of-text; every token of
it is a label. A row is S labels and one token before them. Positions in the stream are int64: a
part may hold any number of tokens.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

WINDOW_DOCUMENTS = 1 << 16  # documents that are fitted among each other


class Rows(NamedTuple):
    """Rows as they are stored."""

    tokens: np.ndarray  # (n, S+1)
    loss_mask: np.ndarray  # (n, S) uint8


class Segments(NamedTuple):
    """Which part of which document lies where; one entry a segment, in the order of rows."""

    document: np.ndarray  # int64
    start: np.ndarray  # int32: its first label within the document
    size: np.ndarray  # int32: labels
    offset: np.ndarray  # int32: its first place among the row's labels
    row_starts: np.ndarray  # (rows + 1,) int64: the first segment of each row

    @property
    def num_rows(self) -> int:
        """Rows that the segments fill."""
        return len(self.row_starts) - 1


# (first, last) label of the stream -> its tokens; label -1 is the end-of-text before the stream.
ReadLabels = Callable[[int, int], np.ndarray]
# document, its first and last label -> their tokens.
ReadDocument = Callable[[int, int, int], np.ndarray]


def num_joined_rows(num_labels: int, sequence_length: int, pad_tail: bool) -> int:
    """Returns the rows that a stream is cut into."""
    full, rest = divmod(num_labels, sequence_length)
    return full + (pad_tail and rest > 0)


def joined_rows(
    read: ReadLabels, first: int, last: int, num_labels: int, sequence_length: int, fill: int
) -> Rows:
    """Returns rows [first, last) of a stream that is cut every S labels.

    Row k is the token before label k*S and the labels [k*S, k*S + S): row k+1 begins with row k's
    last token, and every token of the stream is a label exactly once.

    Args:
      read: of the stream.
      first: row.
      last: row after the last one; it may be cut short by the stream's end and is filled up.
      num_labels: of the stream.
      sequence_length: S.
      fill: id that fills up.
    """
    length, num_rows = sequence_length, last - first
    stop = min(last * length, num_labels)
    tokens = read(first * length - 1, stop)
    missing = num_rows * length + 1 - len(tokens)
    if missing:
        tokens = np.concatenate([tokens, np.full(missing, fill, tokens.dtype)])
    # Overlapping windows: (num_rows, S+1)
    rows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length]
    loss_mask = np.ones((num_rows, length), np.uint8)
    if missing:
        loss_mask[-1, length - missing :] = 0
    return Rows(rows, loss_mask)


def fit_documents(num_labels: np.ndarray, sequence_length: int, share_rows: bool) -> Segments:
    """Decides which rows hold which documents: none that fits a row is split.

    A longer document fills rows of its own; what remains of it goes on in another row, behind a
    repeated token that is no label. With `share_rows` each document goes to the fullest row that
    has room for it, the longest first.

    Args:
      num_labels: (n,) tokens of each document, end-of-text included.
      sequence_length: S.
      share_rows: whether a row may hold several documents.

    Source: Ding et al., "Fewer truncations improve language modeling", arXiv 2404.10830.
    """
    windows = [
        _fit_window(
            num_labels[first : first + WINDOW_DOCUMENTS], first, sequence_length, share_rows
        )
        for first in range(0, len(num_labels), WINDOW_DOCUMENTS)
    ]
    columns = [np.concatenate(parts) for parts in zip(*windows, strict=True)] if windows else []
    if not columns:
        columns = [np.empty(0, np.int64)] * 5
    document, start, size, offset, row_sizes = columns
    return Segments(
        document,
        start.astype(np.int32),
        size.astype(np.int32),
        offset.astype(np.int32),
        np.concatenate([np.zeros(1, np.int64), np.cumsum(row_sizes, dtype=np.int64)]),
    )


def _fit_window(
    num_labels: np.ndarray, first_document: int, length: int, share_rows: bool
) -> tuple[np.ndarray, ...]:
    """Returns document, start, size, offset of segments, and segments of each row."""
    num_full, rest = np.divmod(num_labels.astype(np.int64), length)
    split = num_full > 0
    full_of = np.repeat(np.arange(len(num_labels)), num_full)
    piece = np.arange(len(full_of)) - np.repeat(np.cumsum(num_full) - num_full, num_full)
    fitted = np.flatnonzero(rest)
    needed = (rest + split)[fitted]  # a rest brings the token before it
    rows, offsets = (
        _best_fit(needed, length)
        if share_rows
        else (
            np.arange(len(fitted)),
            np.zeros(len(fitted), np.int64),
        )
    )
    num_shared = int(rows.max()) + 1 if len(rows) else 0
    document = np.concatenate([fitted, full_of])
    start = np.concatenate([(num_full * length)[fitted], piece * length])
    size = np.concatenate([rest[fitted], np.full(len(full_of), length)])
    offset = np.concatenate([offsets + split[fitted], np.zeros(len(full_of), np.int64)])
    row = np.concatenate([rows, num_shared + np.arange(len(full_of))])
    # Rows stay about where their first document is in the shuffle.
    earliest = np.full(num_shared + len(full_of), len(num_labels), np.int64)
    np.minimum.at(earliest, row, document)
    place = np.empty(len(earliest), np.int64)
    place[np.argsort(earliest, kind="stable")] = np.arange(len(earliest))
    order = np.lexsort((offset, place[row]))
    row_sizes = np.bincount(place[row], minlength=len(earliest))
    return document[order] + first_document, start[order], size[order], offset[order], row_sizes


def _best_fit(needed: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the row and the offset of items, each in the fullest row with room, largest first."""
    rows, offsets = np.empty(len(needed), np.int64), np.empty(len(needed), np.int64)
    by_room: list[list[int]] = [[] for _ in range(length + 1)]
    has_room = 0  # bit k: some row has room k
    num_rows = 0
    order = np.argsort(-needed, kind="stable")
    for index, size in zip(order.tolist(), needed[order].tolist(), strict=True):
        fitting = has_room >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                has_room ^= 1 << room
        else:
            room, row = length, num_rows
            num_rows += 1
        rows[index], offsets[index] = row, length - room
        if room > size:
            by_room[room - size].append(row)
            has_room |= 1 << (room - size)
    return rows, offsets


def fitted_rows(
    read: ReadDocument,
    segments: Segments,
    prompts: np.ndarray | None,
    first: int,
    last: int,
    sequence_length: int,
    end_of_text_id: int,
    dtype: np.dtype,
) -> Rows:
    """Returns rows [first, last) of fitted documents, filled up with end-of-text.

    Args:
      read: of the documents.
      segments: of all rows.
      prompts: leading tokens of each document that are no labels; None means none.
      first: row.
      last: row after the last one.
      sequence_length: S.
      end_of_text_id: stands before documents and fills up.
      dtype: of the tokens.
    """
    num_rows = last - first
    tokens = np.full((num_rows, sequence_length + 1), end_of_text_id, dtype)
    loss_mask = np.zeros((num_rows, sequence_length), np.uint8)
    bounds = segments.row_starts[first : last + 1]
    row = np.repeat(np.arange(num_rows), np.diff(bounds)).tolist()
    chosen = slice(int(bounds[0]), int(bounds[-1]))
    columns = [segments.document, segments.start, segments.size, segments.offset]
    lists = [column[chosen].tolist() for column in columns]
    for k, document, start, size, offset in zip(row, *lists, strict=True):
        before = 1 if start else 0  # a document that goes on brings the token before
        tokens[k, offset + 1 - before : offset + 1 + size] = read(
            document, start - before, start + size
        )
        loss_mask[k, offset : offset + size] = 1
        if prompts is not None:
            loss_mask[k, offset : offset + max(0, min(size, int(prompts[document]) - start))] = 0
    return Rows(tokens, loss_mask)


def document_ids(tokens: np.ndarray, end_of_text_id: int) -> np.ndarray:
    """Returns, (n, S+1), which document of its row each token belongs to, counted from 0.

    An end-of-text belongs to the document that it stands before, as the model reads it: its label
    is that document's first token. It never stands inside one, because a text's own
    `<|endoftext|>` is text.
    """
    ends = tokens == end_of_text_id
    return np.cumsum(ends, axis=1, dtype=np.int32) - ends[:, :1]
