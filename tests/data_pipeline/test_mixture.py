import json
import shutil

import numpy as np
import pytest
from sample_corpus import corpus_documents

from data_pipeline.dataset import TokenData
from data_pipeline.mixture import append_segment, parse_weights
from data_pipeline.preparation import prepare
from data_pipeline.stdlib_corpus import encode_jsonl_zst
from data_pipeline.verifying import find_problems
from tfbig.config import PrepareConfig
from tfbig.errors import UserError


@pytest.fixture
def folder(data_folder, tmp_path):
    return shutil.copytree(data_folder, tmp_path / "copy")


def rows(folder, first, last):
    return TokenData.open(folder).rows("train", np.arange(first, last), seed=3)


def assert_equal(left, right):
    for name in left:
        assert np.array_equal(left[name], right[name]), name


def shares(folder, first, last):
    data = TokenData.open(folder)
    batch = data.rows("train", np.arange(first, last), 3)
    counts = np.bincount(batch["source_index"], minlength=len(data.sources))
    return dict(zip(data.sources, counts / (last - first), strict=True))


def test_a_segment_changes_the_future_and_not_the_past(folder, data_folder):
    append_segment(folder, 100, {"Pile-CC": 3.0})
    assert_equal(rows(folder, 0, 100), rows(data_folder, 0, 100))
    before = TokenData.open(data_folder)
    num = before.contents["splits"]["train"]["sources"]
    weighted = 3 * num["Pile-CC"]["rows"]
    expected = weighted / (weighted + num["Github"]["rows"])
    assert shares(folder, 100, 5100)["Pile-CC"] == pytest.approx(expected, abs=0.01)
    data = TokenData.open(folder)
    assert data.manifest_sha256 == before.manifest_sha256
    assert data.identity(100) == before.identity(100) != data.identity(101)


def test_a_source_is_added_mid_run(folder, data_folder, tmp_path):
    new = [(f"new {text}", "New") for text, _ in corpus_documents()]
    (tmp_path / "new.jsonl.zst").write_bytes(encode_jsonl_zst(new))
    other = prepare(
        PrepareConfig(
            data=str(tmp_path / "other"),
            source=str(tmp_path / "new.jsonl.zst"),
            tokenizer=str(data_folder / "tokenizer.json"),
            sequence_length=16,
            validation_fraction=0,
            shard_bytes=3000,
        ),
        say=lambda text: None,
    )
    segment = append_segment(folder, 50, {"Github": 0}, 40, other)
    assert segment["weights"] == {"Github": 0.0, "Pile-CC": 1.0, "New": 1.0}
    shutil.rmtree(other)
    data = TokenData.open(folder)
    assert data.sources == ("Github", "Pile-CC", "New")
    assert_equal(rows(folder, 0, 50), rows(data_folder, 0, 50))
    found = shares(folder, 50, 2050)
    assert found["Github"] == 0 and found["New"] > found["Pile-CC"]
    later = data.rows("train", np.arange(50, 1000), 3)
    of_new = later["tokens"][later["source_index"] == 2]
    assert "new 0:" in data.tokenizer.decode(of_new.ravel())
    assert not list(find_problems(folder, lambda text: None))
    assert data.manifest_sha256 == TokenData.open(data_folder).manifest_sha256


def test_what_would_change_the_past_or_mean_nothing_is_refused(folder, tmp_path):
    append_segment(folder, 100, {"Github": 2.0}, consumed_samples=100)
    for arguments, problem in (
        ((99, {"Github": 1.0}), "not behind the last segment"),
        ((150, {"Github": 1.0}, 151), "lies in the past: the run has consumed 151"),
        ((200, {"Githu": 1.0}), "no source 'Githu'. Did you mean Github"),
        ((200, {"Github": 0.0, "Pile-CC": 0.0}), "nothing to train on"),
        ((200, {"Github": 1e300}), "only the weights' ratios matter"),
        ((200, {"Github": 1e18}), "only the weights' ratios matter"),
        ((200, {}, 0, tmp_path / "none"), "there is no data folder"),
        ((200, {}, 0, folder), "sources of names that"),
    ):
        with pytest.raises(UserError, match=problem):
            append_segment(folder, *arguments)
    contents = json.loads((folder / "manifest.json").read_text())
    assert [segment["first_sample"] for segment in contents["mixture"]] == [0, 100]
    append_segment(folder, 100, {"Github": 3.0}, consumed_samples=100)  # not consumed yet
    contents = json.loads((folder / "manifest.json").read_text())
    assert contents["mixture"][1]["weights"] == {"Github": 3.0, "Pile-CC": 1.0}


def test_weights_as_they_are_written():
    assert parse_weights(" a=1, b c=0.5,") == {"a": 1.0, "b c": 0.5}
    for text in ("a", "a=", "=1", "a=x", "a=-1", "a=nan", "a=inf"):
        with pytest.raises(UserError, match="no SOURCE=WEIGHT"):
            parse_weights(text)
    for text, problem in (("a=1,b=2,a=1", "names a twice"), (" , ", "names no source")):
        with pytest.raises(UserError, match=problem):
            parse_weights(text)
