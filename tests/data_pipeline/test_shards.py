import hashlib
import struct

import numpy as np
import pytest

from data_pipeline.shards import (
    Feature,
    RecordLayout,
    ShardReader,
    ShardWriter,
    masked_crc32c,
    row_features,
)


def all_features(length, dtype):
    return (
        *row_features(length, dtype),
        Feature("loss_mask", "|u1", length),
        Feature("document_ids", "<i4", length + 1),
    )


def random_rows(layout, num_rows, seed=0):
    generator = np.random.default_rng(seed)
    return {
        f.name: generator.integers(0, 200, (num_rows, f.length)).astype(f.dtype)
        for f in layout.features
    }


def write(path, layout, *blocks):
    writer = ShardWriter(path, layout)
    for block in blocks:
        writer.write(block)
    assert not path.exists()
    return writer.close("Github")


def test_the_checksum_is_tfrecords():
    # RFC 3720, B.4: the CRC32C of 32 zero bytes is 8a9136aa.
    crc = 0x8A9136AA
    expected = (((crc >> 15) | (crc << 17)) + 0xA282EAD8) % 2**32
    assert masked_crc32c([bytes(32)]).tolist() == [expected]


@pytest.mark.parametrize("length", [1, 16, 256, 2048])
@pytest.mark.parametrize("dtype", ["<u2", "<i4"])
@pytest.mark.parametrize("make", [row_features, all_features])
def test_rows_come_back_and_tensorflow_reads_the_same(tmp_path, length, dtype, make):
    import tensorflow as tf

    layout = RecordLayout(make(length, np.dtype(dtype)))
    blocks = [random_rows(layout, n, seed=n) for n in (3, 0, 2)]
    path = tmp_path / "shard"
    info = write(path, layout, *blocks)
    data = path.read_bytes()
    assert len(data) == 5 * layout.stride == info.bytes
    assert info.sha256 == hashlib.sha256(data).hexdigest()
    assert (info.rows, info.source, info.file) == (5, "Github", "shard")
    expected = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    assert info.max_id == expected["tokens"].max()

    reader = ShardReader(path, layout.to_manifest(), layout.stride, 5)
    rows = np.array([4, 0, 0, 2])
    for name, values in expected.items():
        found = reader.read(name, rows)
        assert found.dtype == values.dtype and np.array_equal(found, values[rows])
    assert reader.find_damage() == -1

    parse = {name: tf.io.FixedLenFeature([], tf.string) for name in expected}
    records = list(tf.data.TFRecordDataset(str(path)))
    assert len(records) == 5
    for row, record in enumerate(records):
        example = tf.io.parse_single_example(record, parse)
        for name, values in expected.items():
            found = np.frombuffer(example[name].numpy(), values.dtype)
            assert np.array_equal(found, values[row])


def test_tensorflows_own_example_has_the_same_bytes(tmp_path):
    import tensorflow as tf

    layout = RecordLayout(row_features(300, np.dtype("<u2")))
    rows = random_rows(layout, 1)
    write(tmp_path / "ours", layout, rows)
    values = tf.train.BytesList(value=[rows["tokens"].tobytes()])
    features = tf.train.Features(feature={"tokens": tf.train.Feature(bytes_list=values)})
    with tf.io.TFRecordWriter(str(tmp_path / "theirs")) as writer:
        writer.write(tf.train.Example(features=features).SerializeToString())
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_flipped_bit_is_found(tmp_path):
    layout = RecordLayout(row_features(16, np.dtype("<u2")))
    write(tmp_path / "shard", layout, random_rows(layout, 6))
    data = bytearray((tmp_path / "shard").read_bytes())
    data[4 * layout.stride + layout.offsets["tokens"] + 3] ^= 1
    (tmp_path / "shard").write_bytes(data)
    reader = ShardReader(tmp_path / "shard", layout.to_manifest(), layout.stride, 6)
    assert reader.find_damage() == 4


def test_the_layout_is_told_not_assumed(tmp_path):
    """Offsets are the manifest's: a record's framing is TFRecord's, 8 + 4 bytes before it."""
    layout = RecordLayout(row_features(2048, np.dtype("<u2")))
    assert layout.to_manifest() == {"tokens": {"dtype": "<u2", "length": 2049, "offset": 35}}
    assert layout.stride == 4137
    (length,) = struct.unpack_from("<Q", layout.template.tobytes())
    assert length == 4137 - 16


def test_rows_of_another_shape_are_our_own_mistake(tmp_path):
    layout = RecordLayout(row_features(16, np.dtype("<u2")))
    writer = ShardWriter(tmp_path / "shard", layout)
    with pytest.raises(AssertionError):
        writer.write({"tokens": np.zeros((2, 16), np.uint16)})
