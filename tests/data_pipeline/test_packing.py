import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline import packing
from data_pipeline.packing import Packer

END = 0
documents_strategy = st.lists(
    st.lists(st.integers(1, 500), min_size=1, max_size=30), min_size=0, max_size=20
)


def packed(documents, length):
    packer = Packer(length, END, np.dtype(np.uint16))
    blocks = list(packer.rows(np.array(d, np.uint16) for d in documents))
    rows = np.concatenate(blocks) if blocks else np.empty((0, length + 1), np.uint16)
    return packer, rows


@given(documents_strategy, st.integers(1, 20), st.sampled_from([1, 7, 64, 1 << 22]))
@settings(max_examples=150, deadline=None)
def test_every_token_of_every_document_is_a_label_once_and_in_order(documents, length, block):
    original, packing._BLOCK_TOKENS = packing._BLOCK_TOKENS, block
    try:
        packer, rows = packed(documents, length)
    finally:
        packing._BLOCK_TOKENS = original
    labels = [token for document in documents for token in [*document, END]]
    tail, loss_mask = packer.pad_tail(fill_id=END)
    tail_labels = tail[:, 1:][loss_mask == 1]
    assert [*rows[:, 1:].ravel(), *tail_labels] == labels
    assert len(tail_labels) == packer.num_tail_tokens == len(labels) % length
    assert len(rows) == len(labels) // length
    assert packer.num_tokens == len(labels)
    everything = np.concatenate([rows, tail])
    if len(everything):
        assert everything[0, 0] == END  # the first document begins like all others
        assert np.array_equal(everything[1:, 0], everything[:-1, -1])
    assert rows.shape[1] == length + 1 and rows.dtype == np.uint16


def test_a_known_stream():
    packer, rows = packed([[1, 2, 3], [4], [5, 6]], 4)
    assert rows.tolist() == [[0, 1, 2, 3, 0], [0, 4, 0, 5, 6]]
    assert packer.num_tail_tokens == 1
    tail, loss_mask = packer.pad_tail(fill_id=9)
    assert tail.tolist() == [[6, 0, 9, 9, 9]] and loss_mask.tolist() == [[1, 0, 0, 0]]
