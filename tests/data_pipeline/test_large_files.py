"""Files beyond 2^31 tokens and 2^32 bytes, simulated: what is in them lies at their ends."""

import mmap
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from data_pipeline.sharding import PartStream
from data_pipeline.shards import RecordLayout, ShardReader, ShardWriter, row_features
from data_pipeline.shuffling import PartOrder
from data_pipeline.token_store import IndexedTokens, write_index

MOST = 2**31 - 1  # tokens of one document
LENGTHS = np.array([MOST, MOST, 4], np.int64)
LAST = [7, 8, 9, 0]  # the last document, with end-of-text


@pytest.fixture
def store(tmp_path):
    """A store of 2^32 + 2 tokens in three documents; its file is sparse."""
    folder = tmp_path / "tokens" / "chunk"
    folder.mkdir(parents=True)
    write_index(folder / "tokens.idx", LENGTHS, np.dtype("<u2"))
    with open(folder / "tokens.bin", "wb") as file:
        file.truncate(2 * int(LENGTHS.sum()) - 8)
        file.seek(0, 2)
        file.write(np.array(LAST, "<u2").tobytes())
    return folder / "tokens"


def test_a_store_of_more_than_32_bits_of_tokens(store):
    found = IndexedTokens(store)
    assert found.ends.tolist() == [MOST, 2 * MOST, 2 * MOST + 4]
    assert found.tokens[found.ends[1] : found.ends[2]].tolist() == LAST
    # Pointers as Megatron's reader takes them: bytes, 64 bits.
    index = store.with_suffix(".idx").read_bytes()
    pointers = np.frombuffer(index, "<i8", 3, 34 + 3 * 4)
    assert pointers.tolist() == [0, 2 * MOST, 4 * MOST]


def test_a_stream_of_more_than_32_bits_of_labels(store, tmp_path):
    order = PartOrder(
        np.zeros(3, np.uint32),
        np.array([MOST, 2 * MOST, 0]),  # the last document is second
        np.cumsum(LENGTHS[[1, 2, 0]]),
        None,
        None,
    )
    stores = SimpleNamespace(pieces=[("chunk", 0, 3)])
    stream = PartStream(order, stores, tmp_path, 0)
    assert stream.labels(MOST - 2, MOST + 6).tolist() == [0, 0, *LAST, 0, 0]
    end = int(LENGTHS.sum())
    assert stream.labels(end - 3, end).tolist() == [0, 0, 0]
    assert stream.document(1, 0, 4).tolist() == LAST


def shard_of(tmp_path, num_rows):
    """A shard whose last row alone is written."""
    layout = RecordLayout(row_features(16, np.dtype("<u2")))
    writer = ShardWriter(tmp_path / "row", layout)
    writer.write({"tokens": np.arange(17)[np.newaxis]})
    writer.close("Github")
    row = (tmp_path / "row").read_bytes()
    with open(tmp_path / "shard", "wb") as file:
        file.truncate(layout.stride * (num_rows - 1))
        file.seek(0, 2)
        file.write(row)
    return tmp_path / "shard", layout


def test_a_row_beyond_4_gib(tmp_path):
    num_rows = 2**32 // 50 + 5
    path, layout = shard_of(tmp_path, num_rows)
    assert path.stat().st_size > 2**32
    reader = ShardReader(path, layout.to_manifest(), layout.stride, num_rows)
    found = reader.read("tokens", np.array([num_rows - 1, 0]))
    assert found.tolist() == [list(range(17)), [0] * 17]
    reader.read_ahead(np.array([num_rows - 1]), 1)


CUT_WHILE_READ = """
import os, sys
import numpy as np
from data_pipeline.shards import ShardReader

path, stride, features = sys.argv[1], int(sys.argv[2]), eval(sys.argv[3])
reader = ShardReader(path, features, stride, 1000)
reader.read("tokens", np.array([0]))
os.truncate(path, 0)
reader.read("tokens", np.array([999]))
"""


@pytest.mark.skipif(not hasattr(mmap, "MAP_SHARED"), reason="no mapped files")
def test_a_shard_cut_while_it_is_read_ends_the_process(tmp_path):
    """By the kernel's signal, never with tokens that are none: a restart says which shard it is."""
    path, layout = shard_of(tmp_path, 1000)
    arguments = [str(path), str(layout.stride), repr(layout.to_manifest())]
    done = subprocess.run([sys.executable, "-c", CUT_WHILE_READ, *arguments], timeout=60)
    assert done.returncode == -signal.SIGBUS
