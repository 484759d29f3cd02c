import struct

import numpy as np
import pytest

from data_pipeline.token_store import (
    IndexedTokens,
    TokenStore,
    token_dtype,
    write_index,
    write_store,
)
from tfbig.errors import UserError


def write(path, documents, dtype="<u2", prompts=None):
    keys = np.arange(len(documents), dtype=np.uint64) + np.uint64(2**63)
    arrays = [np.array(document[:-1]) for document in documents]
    assert all(document[-1] == 7 for document in documents)
    digests = np.stack([keys, keys + np.uint64(7)], axis=1)
    return write_store(path, arrays, 7, digests, np.dtype(dtype), prompts)


@pytest.mark.parametrize(("vocab_size", "name"), [(65536, "uint16"), (65537, "int32")])
def test_documents_come_back(tmp_path, vocab_size, name):
    dtype = token_dtype(vocab_size)
    assert dtype == np.dtype(name)
    documents = [[5, vocab_size - 1, 7], [7], [*range(1, 100), 7]]
    write(tmp_path / "a", documents, dtype, np.array([1, 0, 2]))
    store = TokenStore(tmp_path / "a")
    assert store.keys.tolist() == [2**63, 2**63 + 1, 2**63 + 2]
    assert store.checks.tolist() == [2**63 + 7, 2**63 + 8, 2**63 + 9]
    assert store.num_tokens == 104 and store.prompts.tolist() == [1, 0, 2]
    for start, length, document in zip(store.starts, store.lengths, documents, strict=True):
        found = store.tokens[start : start + length]
        assert found.dtype == dtype and found.tolist() == document


def test_the_files_are_megatrons(tmp_path):
    """Read as core/datasets/indexed_dataset.py reads: header, lengths, pointers, bounds."""
    write(tmp_path / "a", [[1, 2, 3, 7], [4, 7]])
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
    write(tmp_path / "a", [])
    store = TokenStore(tmp_path / "a")
    assert store.num_tokens == store.num_documents == 0 and store.prompts is None


def test_a_document_beyond_31_bits_is_refused(tmp_path):
    with pytest.raises(UserError, match="2,147,483,648 tokens"):
        write_index(tmp_path / "a.idx", np.array([3, 1 << 31]), np.dtype("<u2"))


def test_damaged_files_are_named(tmp_path):
    write(tmp_path / "a", [[1, 7], [7]])
    index, tokens = (tmp_path / "a.idx").read_bytes(), (tmp_path / "a.bin").read_bytes()
    for data, problem in ((index[:40], "cut short"), (b"x" + index, "no index of Megatron's")):
        (tmp_path / "a.idx").write_bytes(data)
        with pytest.raises(UserError, match=problem):
            IndexedTokens(tmp_path / "a")
    (tmp_path / "a.idx").write_bytes(index)
    (tmp_path / "a.bin").write_bytes(tokens[:-1])
    with pytest.raises(UserError, match="5 bytes, its index says 3 tokens x 2"):
        IndexedTokens(tmp_path / "a")
    (tmp_path / "a.bin").unlink()
    with pytest.raises(UserError, match="cannot read"):
        IndexedTokens(tmp_path / "a")
