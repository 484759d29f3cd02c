import dataclasses
import json
import shutil

import numpy as np
import pytest
from sample_corpus import SEQUENCE_LENGTH

from data_pipeline import feeding, manifest
from data_pipeline.dataset import TokenData
from data_pipeline.preparation import prepare
from data_pipeline.shards import Feature, RecordLayout, ShardWriter, row_features
from tfbig.errors import UserError

TRAIN_FEATURES = ("tokens", "sample_index", "source_index", "loss_mask")


@pytest.fixture(scope="module")
def data(data_folder):
    return TokenData.open(data_folder)


def batches(dataset):
    return [{name: value.numpy() for name, value in batch.items()} for batch in dataset]


def joined(found):
    return {name: np.concatenate([batch[name] for batch in found]) for name in found[0]}


def assert_equal(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype
        assert np.array_equal(left[name], right[name]), name


def test_what_is_in_the_folder(data):
    assert data.sequence_length == SEQUENCE_LENGTH and data.vocab_size == 320
    assert data.sources == ("Github", "Pile-CC")
    assert data.splits == ("train", "validation")
    assert data.num_rows("test") == data.num_bytes("test") == 0
    for split in data.splits:
        whole = data.rows_in_order(split, np.arange(data.num_rows(split)))
        for index, source in enumerate(data.sources):
            labels = whole["tokens"][whole["source_index"] == index][:, 1:]
            assert data.num_bytes(split, source) == data.tokenizer.num_bytes(labels)
        total = sum(data.num_bytes(split, source) for source in data.sources)
        assert data.num_bytes(split) == total > 0
    assert data.num_bytes("train", "none such") == 0
    assert len(data._contents["splits"]["train"]["shards"]) > 4


def test_batches_have_static_shapes_and_the_contracts_dtypes(data):
    dataset = data.train_batches(0, 2, global_batch=6, data_rank=0, data_size=2, seed=1)
    spec = {k: (tuple(v.shape), v.dtype.name) for k, v in dataset.element_spec.items()}
    assert spec == {
        "tokens": ((3, SEQUENCE_LENGTH + 1), "int32"),
        "sample_index": ((3,), "int64"),
        "source_index": ((3,), "int32"),
        "loss_mask": ((3, SEQUENCE_LENGTH), "uint8"),
    }
    found = batches(dataset)
    assert len(found) == 2
    for batch in found:
        assert {k: (v.shape, v.dtype.name) for k, v in batch.items()} == spec
        assert batch["loss_mask"].all()


@pytest.mark.parametrize("data_size", [1, 2, 4])
def test_the_stream_is_the_same_for_every_world_size(data, data_size):
    num_steps, global_batch = 2 * data.num_rows("train") // 8 + 3, 8  # into a third epoch
    ranks = [
        batches(data.train_batches(0, num_steps, global_batch, rank, data_size, seed=3))
        for rank in range(data_size)
    ]
    assert {len(rank) for rank in ranks} == {num_steps}
    stream = joined([rank[step] for step in range(num_steps) for rank in ranks])
    positions = np.arange(num_steps * global_batch)
    assert np.array_equal(stream["sample_index"], positions)
    assert_equal(stream, data.rows("train", positions, seed=3))


@pytest.mark.parametrize(("data_size", "slice_rows"), [(3, 3), (3, 4), (5, 2)])
def test_slices_that_do_not_divide_are_filled_up(data, data_size, slice_rows):
    whole = joined(batches(data.train_batches(16, 5, global_batch=8, seed=1)))
    parts = [
        joined(
            batches(data.train_batches(16, 5, 8, rank, data_size, seed=1, slice_rows=slice_rows))
        )
        for rank in range(data_size)
    ]
    for step in range(5):
        rows = slice(step * slice_rows, (step + 1) * slice_rows)
        given = {name: np.concatenate([part[name][rows] for part in parts]) for name in parts[0]}
        assert len(given["tokens"]) == data_size * slice_rows > 8
        assert not given["loss_mask"][8:].any()
        own = {name: value[step * 8 : (step + 1) * 8] for name, value in whole.items()}
        assert_equal({name: value[:8] for name, value in given.items()}, own)


def test_an_epoch_holds_every_row_once(data):
    size = data.num_rows("train")
    in_order = data.rows_in_order("train", np.arange(size))
    for epoch in range(2):
        positions = epoch * size + np.arange(size)
        shuffled = data.rows("train", positions, seed=0)
        assert not np.array_equal(shuffled["tokens"], in_order["tokens"])
        for name in ("tokens", "source_index"):
            rows = [np.sort(np.array([str(row) for row in b[name]])) for b in (shuffled, in_order)]
            assert np.array_equal(*rows)


@pytest.mark.parametrize("consumed", [0, 1, 8, 37, 1000, 123457])
def test_a_run_resumes_at_any_position(data, consumed):
    again = joined(batches(data.train_batches(consumed, 5, 4, seed=2)))
    assert_equal(again, data.rows("train", consumed + np.arange(20), seed=2))


def test_steps_beyond_what_is_looked_up_at_once(data, monkeypatch):
    monkeypatch.setattr("data_pipeline.feeding._SAMPLES_AHEAD", 10)
    found = joined(batches(data.train_batches(5, 20, 4, 1, 2, seed=2)))
    positions = 5 + (np.arange(20)[:, None] * 4 + 2 + np.arange(2)).ravel()
    assert_equal(found, data.rows("train", positions, seed=2))


@pytest.mark.parametrize("data_size", [1, 3])
def test_evaluation_takes_a_split_once_and_fills_the_last_batch(data, data_size):
    size, global_batch = data.num_rows("validation"), 6
    assert size % global_batch
    ranks = [
        batches(data.evaluation_batches("validation", global_batch, rank, data_size))
        for rank in range(data_size)
    ]
    num_steps = -(-size // global_batch)
    assert {len(rank) for rank in ranks} == {num_steps}
    stream = joined([rank[step] for step in range(num_steps) for rank in ranks])
    assert len(stream["tokens"]) == num_steps * global_batch
    assert stream["loss_mask"][:size].all() and not stream["loss_mask"][size:].any()
    assert (stream["tokens"] < data.vocab_size).all()
    expected = data.rows_in_order("validation", np.arange(size))
    assert_equal({name: values[:size] for name, values in stream.items()}, expected)


def test_a_split_that_is_not_there_gives_no_batch(data):
    assert batches(data.evaluation_batches("test", 4)) == []


def test_tfds_reads_the_folder(data, data_folder):
    tfds = pytest.importorskip("tensorflow_datasets")
    one_shard_at_a_time = tfds.ReadConfig(interleave_cycle_length=1)
    builder = tfds.builder_from_directory(str(data_folder))
    for split in data.splits:
        size = data.num_rows(split)
        assert builder.info.splits[split].num_examples == size
        dataset = builder.as_dataset(f"{split}[2:{size - 1}]", read_config=one_shard_at_a_time)
        found = np.stack([example["tokens"].numpy() for example in dataset])
        expected = data.rows_in_order(split, np.arange(2, size - 1))["tokens"]
        assert np.array_equal(found, expected)


def test_the_registered_tfds_dataset_holds_the_same_rows(data, data_folder, tmp_path):
    tfds = pytest.importorskip("tensorflow_datasets")
    import data_pipeline.tfds_builder  # noqa: F401

    builder = tfds.builder("tfbig_text", folder=str(data_folder), data_dir=tmp_path)
    builder.download_and_prepare()
    for split in data.splits:
        found = list(tfds.as_numpy(builder.as_dataset(split)))
        expected = data.rows_in_order(split, np.arange(data.num_rows(split)))
        for name, values in (("tokens", expected["tokens"]), ("source", expected["source_index"])):
            left = np.stack([example[name] for example in found])
            assert sorted(map(str, left.tolist())) == sorted(map(str, values.tolist()))


def test_the_registered_tfds_dataset_holds_stored_document_ids(prepare_config, tmp_path):
    tfds = pytest.importorskip("tensorflow_datasets")
    import data_pipeline.tfds_builder  # noqa: F401

    config = dataclasses.replace(prepare_config, packing="best_fit", document_mask=True)
    data = TokenData.open(prepare(config, lambda text: None))
    builder = tfds.builder("tfbig_text", folder=str(data.folder), data_dir=tmp_path / "tfds")
    builder.download_and_prepare()
    names = ("tokens", "loss_mask", "document_ids")
    for split in data.splits:
        expected = data.rows_in_order(split, np.arange(data.num_rows(split)))
        rows = tfds.as_numpy(builder.as_dataset(split))
        found = [[row[name].tolist() for name in names] for row in rows]
        stored = zip(*(expected[name].tolist() for name in names), strict=True)
        assert sorted(found) == sorted(map(list, stored))


def test_tfrecord_dataset_reads_what_is_mapped(data, data_folder):
    import tensorflow as tf

    shards = data._contents["splits"]["train"]["shards"]
    records = tf.data.TFRecordDataset([str(data_folder / shard["file"]) for shard in shards])
    feature = {"tokens": tf.io.FixedLenFeature([], tf.string)}
    found = [
        tf.io.decode_raw(tf.io.parse_single_example(record, feature)["tokens"], tf.uint16).numpy()
        for record in records
    ]
    expected = data.rows_in_order("train", np.arange(data.num_rows("train")))["tokens"]
    assert np.array_equal(np.stack(found), expected)


def test_stored_masks_and_document_ids_are_fed(data_folder, tmp_path):
    """Rows that are padded, as prompt and completion rows are, beside a short last batch."""
    folder, length = tmp_path / "data", 4
    folder.mkdir()
    shutil.copy(data_folder / "tokenizer.json", folder)
    layout = RecordLayout(
        (
            *row_features(length, np.dtype("<u2")),
            Feature("loss_mask", "|u1", length),
            Feature("document_ids", "<u2", length + 1),
        )
    )
    generator = np.random.default_rng(0)
    rows = {f.name: generator.integers(0, 2, (5, f.length)) for f in layout.features}
    writer = ShardWriter(folder / "shard", layout)
    writer.write(rows)
    contents = json.loads((data_folder / "manifest.json").read_text())
    contents |= {
        "sequence_length": length,
        "stride": layout.stride,
        "features": layout.to_manifest(),
        "sources": ["a"],
        "splits": {"validation": {"rows": 5, "bytes": 0, "shards": [writer.close("a")._asdict()]}},
    }
    manifest.write(folder, contents)
    found = joined(batches(TokenData.open(folder).evaluation_batches("validation", 4)))
    assert {name: values.dtype.name for name, values in found.items()} == {
        "tokens": "int32",
        "sample_index": "int64",
        "source_index": "int32",
        "loss_mask": "uint8",
        "document_ids": "int32",
    }
    for name, values in rows.items():
        assert np.array_equal(found[name][:5], values)
    assert not found["loss_mask"][5:].any()


def test_several_readers_give_the_batches_of_one(data_folder, monkeypatch):
    """In their order, whichever is ready first, and from any sample on."""
    monkeypatch.setattr(feeding, "_SAMPLES_AHEAD", 24)
    monkeypatch.setattr(feeding, "_GATHER_BYTES", 2000)
    one, many = (TokenData.open(data_folder, data_workers=number) for number in (1, 5))
    for start in (0, 7):
        expected = joined(batches(one.train_batches(start, 80, 6, 1, 2, seed=3)))
        found = joined(batches(many.train_batches(start, 80, 6, 1, 2, seed=3)))
        assert found["sample_index"].tolist() == [
            start + 6 * step + 3 + place for step in range(80) for place in range(3)
        ]
        for name, values in expected.items():
            assert np.array_equal(found[name], values)


def test_a_batch_that_does_not_divide_is_refused(data):
    for make in (
        lambda: data.train_batches(0, 1, 6, 0, 4),
        lambda: data.evaluation_batches("validation", 6, 0, 4),
    ):
        with pytest.raises(UserError, match=r"6 = 4 x 1 \+ 2"):
            make()


# What is wrong with a folder is one line that names it.


@pytest.fixture
def copy(data_folder, tmp_path):
    return shutil.copytree(data_folder, tmp_path / "copy")


def edit_manifest(folder, **changes):
    contents = json.loads((folder / "manifest.json").read_text()) | changes
    (folder / "manifest.json").write_text(json.dumps(contents))


def assert_refused(folder, problem, **arguments):
    with pytest.raises(UserError, match=problem) as caught:
        TokenData.open(folder, **arguments)
    assert "\n" not in str(caught.value)


def test_a_missing_or_foreign_folder(copy, tmp_path):
    assert_refused(tmp_path / "none", "there is no data folder")
    assert_refused(copy / "tokenizer.json", "is a file, not a data folder")
    edit_manifest(copy, format="something else")
    assert_refused(copy, "its manifest.json is of something else")
    (copy / "manifest.json").write_text("[]")
    assert_refused(copy, "is of something else")
    (copy / "manifest.json").write_text("{")
    assert_refused(copy, "cannot be read")
    (copy / "manifest.json").unlink()
    assert_refused(copy, "it has no manifest.json")


@pytest.mark.parametrize("name", ["format_version", "order_version"])
def test_another_format(copy, name):
    edit_manifest(copy, **{name: 1})
    assert_refused(copy, "this tfbig reads format 2, order 2")


def test_a_changed_tokenizer(copy):
    path = copy / "tokenizer.json"
    path.write_bytes(path.read_bytes() + b" ")
    assert_refused(copy, r"tokenizer\.json has changed")
    path.unlink()
    assert_refused(copy, r"has no tokenizer\.json")


def test_a_cut_or_missing_shard(copy):
    path = sorted(copy.glob("*-validation.tfrecord-*"))[-1]
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    assert_refused(copy, f"has {size - 1} bytes instead of {size} ")
    path.unlink()
    assert_refused(copy, f"lacks its shard {path.name}")


def test_ids_beyond_the_vocabulary(copy):
    assert TokenData.open(copy, vocab_size=320).vocab_size == 320
    assert_refused(copy, "ids up to 319, beyond --vocab_size=319", vocab_size=319)
    contents = json.loads((copy / "manifest.json").read_text())
    contents["splits"]["train"]["shards"][1]["max_id"] = 400
    edit_manifest(copy, splits=contents["splits"])
    assert_refused(copy, "ids up to 400, beyond --vocab_size=320", vocab_size=320)
