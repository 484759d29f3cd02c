import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline import packing
from data_pipeline.packing import (
    document_ids,
    fit_documents,
    fitted_rows,
    joined_rows,
    num_joined_rows,
)

END = 0
documents_strategy = st.lists(
    st.lists(st.integers(1, 500), min_size=1, max_size=40), min_size=0, max_size=20
)


def stream_of(documents):
    return np.array([token for document in documents for token in [*document, END]], np.uint16)


def reader_of(documents):
    stream = np.concatenate([[END], stream_of(documents)]).astype(np.uint16)
    return lambda first, last: stream[first + 1 : last + 1]


def joined(documents, length, pad_tail=False, block=3):
    num_labels = len(stream_of(documents))
    num_rows = num_joined_rows(num_labels, length, pad_tail)
    read = reader_of(documents)
    blocks = [
        joined_rows(read, first, min(first + block, num_rows), num_labels, length, END)
        for first in range(0, num_rows, block)
    ]
    if not blocks:
        return np.empty((0, length + 1), np.uint16), np.empty((0, length), np.uint8)
    return tuple(np.concatenate(parts) for parts in zip(*blocks, strict=True))


@given(documents_strategy, st.integers(1, 20), st.booleans(), st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_joined_every_token_is_a_label_once_and_in_order(documents, length, pad_tail, block):
    rows, mask = joined(documents, length, pad_tail, block)
    labels = stream_of(documents).tolist()
    found = rows[:, 1:][mask == 1].tolist()
    dropped = 0 if pad_tail else len(labels) % length
    assert found == labels[: len(labels) - dropped]
    if len(rows):
        assert rows[0, 0] == END  # the first document begins like all others
        assert np.array_equal(rows[1:, 0], rows[:-1, -1])
        assert mask[:-1].all() and (pad_tail or mask.all())
    assert rows.shape[1] == length + 1 and rows.dtype == np.uint16


def test_a_known_stream():
    rows, _ = joined([[1, 2, 3], [4], [5, 6]], 4)
    assert rows.tolist() == [[0, 1, 2, 3, 0], [0, 4, 0, 5, 6]]
    rows, mask = joined([[1, 2, 3], [4], [5, 6]], 4, pad_tail=True)
    assert rows[2].tolist() == [6, 0, 0, 0, 0] and mask[2].tolist() == [1, 0, 0, 0]


def fitted(documents, length, share_rows, prompts=None):
    num_labels = np.array([len(document) + 1 for document in documents], np.int64)
    segments = fit_documents(num_labels, length, share_rows)
    with_ends = [np.array([*document, END], np.uint16) for document in documents]
    return segments, fitted_rows(
        lambda document, first, last: with_ends[document][first:last],
        segments,
        prompts,
        0,
        segments.num_rows,
        length,
        END,
        np.dtype(np.uint16),
    )


@given(documents_strategy, st.integers(2, 20), st.booleans(), st.sampled_from([3, 1 << 16]))
@settings(max_examples=200, deadline=None)
def test_fitted_every_token_is_a_label_once_and_what_fits_is_whole(
    documents, length, share_rows, window
):
    original, packing.WINDOW_DOCUMENTS = packing.WINDOW_DOCUMENTS, window
    try:
        segments, (tokens, mask) = fitted(documents, length, share_rows)
    finally:
        packing.WINDOW_DOCUMENTS = original
    pieces = {}
    for row in range(segments.num_rows):
        chosen = range(segments.row_starts[row], segments.row_starts[row + 1])
        assert len(chosen) == 1 or share_rows
        for k in chosen:
            start, size, offset = segments.start[k], segments.size[k], segments.offset[k]
            document = [*documents[segments.document[k]], END]
            assert (
                tokens[row, 1 + offset : 1 + offset + size].tolist()
                == (document[start : start + size])
            )
            # What stands before is what stood before in the document, or end-of-text.
            assert tokens[row, offset] == (document[start - 1] if start else END)
            pieces.setdefault(int(segments.document[k]), []).append((int(start), int(size)))
    assert mask.sum() == sum(len(document) + 1 for document in documents)
    assert (tokens[:, 1:][mask == 0] <= 500).all() and tokens.shape == (len(mask), length + 1)
    assert sorted(pieces) == list(range(len(documents)))
    for number, parts in pieces.items():
        size = len(documents[number]) + 1
        assert len(parts) == -(-size // length)  # whole where it fits
        at = 0
        for start, count in sorted(parts):
            assert start == at
            at += count
        assert at == size


def test_best_fit_leaves_little_room():
    generator = np.random.default_rng(0)
    lengths = generator.integers(2, 900, 4000)
    segments = fit_documents(lengths, 1024, share_rows=True)
    assert lengths.sum() / (segments.num_rows * 1024) > 0.99
    alone = fit_documents(lengths, 1024, share_rows=False)
    assert alone.num_rows == 4000


def test_prompts_are_no_labels():
    _, (tokens, mask) = fitted([[1, 2, 3], [4, 5]], 8, True, np.array([2, 0]))
    assert tokens.tolist() == [[0, 1, 2, 3, 0, 4, 5, 0, 0]]
    assert mask.tolist() == [[0, 0, 1, 1, 1, 1, 1, 0]]


def test_document_ids_begin_anew_with_every_document():
    rows = np.array([[0, 1, 2, 0, 3, 0], [5, 6, 0, 7, 0, 8]])
    assert document_ids(rows, END).tolist() == [[0, 0, 0, 1, 1, 2], [0, 0, 1, 1, 2, 2]]


def test_positions_beyond_32_bits():
    """A part of more than 2^32 tokens, of which only the rows asked for are read."""
    num_labels, length = 5_000_000_000, 1024
    asked = []

    def read(first, last):
        asked.append((first, last))
        return np.arange(first, last, dtype=np.int64) % 50_000

    row = num_labels // length - 1
    tokens, mask = joined_rows(read, row, row + 1, num_labels, length, 0)
    assert asked == [(row * length - 1, (row + 1) * length)]
    assert tokens[0, 0] == (row * length - 1) % 50_000 and mask.all()
    assert num_joined_rows(num_labels, length, False) == row + 1
    segments = fit_documents(np.array([num_labels // 1000]), length, True)
    assert (segments.start + segments.size).max() == num_labels // 1000 == segments.size.sum()
