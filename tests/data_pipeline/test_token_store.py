import struct

import numpy as np
import pytest

from data_pipeline.token_store import TokenStore, TokenStoreWriter, token_dtype


@pytest.mark.parametrize(("vocab_size", "name"), [(65536, "uint16"), (65537, "int32")])
def test_documents_come_back_in_any_order(tmp_path, vocab_size, name):
    dtype = token_dtype(vocab_size)
    assert dtype == np.dtype(name)
    documents = [np.array([5, vocab_size - 1]), np.array([], int), np.arange(1, 100)]
    writer = TokenStoreWriter(tmp_path / "a", dtype, end_of_text_id=7)
    for number, document in enumerate(documents):
        writer.add(document, key=2**64 - 1 - number)
    assert not list(tmp_path.glob("*.idx"))
    writer.close()
    store = TokenStore(tmp_path / "a")
    assert store.keys.tolist() == [2**64 - 1, 2**64 - 2, 2**64 - 3]
    assert store.num_tokens == 101 + 3
    for index, found in zip([2, 0, 1], store.documents([2, 0, 1]), strict=True):
        assert found.dtype == dtype and found.tolist() == documents[index].tolist()


def test_the_files_are_megatrons(tmp_path):
    """Read as core/datasets/indexed_dataset.py reads: header, lengths, pointers, bounds."""
    writer = TokenStoreWriter(tmp_path / "a", np.dtype("<u2"), end_of_text_id=7)
    writer.add(np.array([1, 2, 3]), 0)
    writer.add(np.array([4]), 1)
    writer.close()
    index = (tmp_path / "a.idx").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    version, code, num_sequences, num_bounds = struct.unpack_from("<QBQQ", index, 9)
    assert (version, code, num_sequences, num_bounds) == (1, 8, 2, 3)
    lengths, pointers, bounds = (
        np.frombuffer(index, "<i4", 2, 34),
        np.frombuffer(index, "<i8", 2, 42),
        np.frombuffer(index, "<i8", 3, 58),
    )
    assert (lengths.tolist(), pointers.tolist(), bounds.tolist()) == ([4, 2], [0, 8], [0, 1, 2])
    assert len(index) == 82
    assert np.fromfile(tmp_path / "a.bin", "<u2").tolist() == [1, 2, 3, 7, 4, 7]


def test_an_empty_store(tmp_path):
    TokenStoreWriter(tmp_path / "a", np.dtype("<u2"), end_of_text_id=7).close()
    assert TokenStore(tmp_path / "a").num_tokens == 0
