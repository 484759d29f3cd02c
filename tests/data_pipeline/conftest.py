import dataclasses

import pytest
from preparing import make_several_inputs
from sample_corpus import SEQUENCE_LENGTH, corpus_documents

from data_pipeline.preparation import prepare
from data_pipeline.stdlib_corpus import encode_jsonl_zst
from tfbig.config import PrepareConfig


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "00.jsonl.zst"
    path.write_bytes(encode_jsonl_zst(corpus_documents()))
    return path


@pytest.fixture
def prepare_config(corpus, tmp_path):
    return PrepareConfig(
        data=str(tmp_path / "data"),
        source=str(corpus),
        sequence_length=SEQUENCE_LENGTH,
        vocab_size=320,
        validation_fraction=0.2,
        shard_bytes=4000,
    )


@pytest.fixture(scope="session")
def data_folder(corpus, tmp_path_factory):
    """A prepared folder of several shards and two sources; tests must not change it."""
    config = PrepareConfig(
        data=str(tmp_path_factory.mktemp("prepared") / "data"),
        source=str(corpus),
        sequence_length=SEQUENCE_LENGTH,
        vocab_size=320,
        validation_fraction=0.2,
        shard_bytes=4000,
        keep_tokens=True,
    )
    return prepare(config, say=lambda text: None)


@pytest.fixture
def several(tmp_path, prepare_config, data_folder):
    make_several_inputs(tmp_path / "several")
    return dataclasses.replace(
        prepare_config,
        source=str(tmp_path / "several"),
        tokenizer=str(data_folder / "tokenizer.json"),
        chunk_bytes=1000,
        keep_tokens=True,
    )
