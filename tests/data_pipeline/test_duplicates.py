"""Equal documents, found in one range of hashes after the other."""

import dataclasses

import numpy as np
import pytest
from preparing import contents, quiet
from sample_corpus import corpus_documents

from data_pipeline import duplicates
from data_pipeline.duplicates import DuplicateFinder
from data_pipeline.plan import Plan
from data_pipeline.preparation import prepare
from data_pipeline.shuffling import PartStores
from data_pipeline.stdlib_corpus import encode_jsonl_zst
from data_pipeline.token_store import write_store
from data_pipeline.work import WorkFolder
from tfbig.config import PrepareConfig

PARTS = [("train", "a"), ("train", "b"), ("validation", "a"), ("test", "b")]
PRIORITY = [("test", "b"), ("validation", "a"), ("train", "a"), ("train", "b")]


def write_chunks(folder, digests, part_of, num_chunks):
    """Writes stores of documents in turns, each one's sorted by part; returns their results."""
    results = {}
    for number in range(num_chunks):
        chosen = np.arange(number, len(digests), num_chunks)
        chosen = chosen[np.argsort(part_of[chosen], kind="stable")]
        path = folder / "tokens" / f"chunk-{number}"
        path.mkdir(parents=True)
        documents = [np.array([index], "<u2") for index in chosen]
        write_store(path / "tokens", documents, 0, digests[chosen], np.dtype("<u2"))
        firsts = np.searchsorted(part_of[chosen], np.arange(len(PARTS) + 1))
        results[path.name] = {
            "parts": [
                {
                    "split": split,
                    "source": source,
                    "first": int(firsts[k]),
                    "documents": int(firsts[k + 1] - firsts[k]),
                    "tokens": 2 * int(firsts[k + 1] - firsts[k]),
                }
                for k, (split, source) in enumerate(PARTS)
                if firsts[k + 1] > firsts[k]
            ]
        }
    return results


@pytest.mark.parametrize("documents_of_a_range", [11, 97, 1 << 23])
@pytest.mark.parametrize("num_documents", [1, 2, 300])
def test_the_first_by_priority_stays(tmp_path, monkeypatch, documents_of_a_range, num_documents):
    monkeypatch.setattr(duplicates, "_PARTITION_DOCUMENTS", documents_of_a_range)
    generator = np.random.default_rng(num_documents)
    keys = generator.integers(0, 2**64, 60, np.uint64)
    keys[:2] = 0, 2**64 - 1
    # Many are equal, and some agree in one half alone.
    pairs = generator.integers(0, [[len(keys), 3]], (num_documents, 2))
    digests = np.stack([keys[pairs[:, 0]], keys[pairs[:, 1]]], axis=1)
    part_of = generator.integers(0, len(PARTS), num_documents)
    results = write_chunks(tmp_path, digests, part_of, 4)
    names = sorted({(p["split"], p["source"]) for r in results.values() for p in r["parts"]})
    parts = [PartStores(name, results) for name in names]
    plan = Plan({}, PrepareConfig(remove_duplicates=True), [])
    finder = DuplicateFinder("name", parts, plan, tmp_path, WorkFolder(tmp_path))
    assert len(finder.sizes()) == -(-num_documents // documents_of_a_range)
    found = finder.run()
    met, expected = set(), {}
    for part in PRIORITY:
        for chunk in range(4):
            for index in range(chunk, num_documents, 4):
                if PARTS[part_of[index]] == part:
                    digest = tuple(digests[index])
                    expected.setdefault(part, []).append(digest not in met)
                    met.add(digest)
    assert {stores.part: finder.kept(stores).tolist() for stores in parts} == expected
    equal = num_documents - len(met)
    assert found == {"equal": equal, "near": 0, "documents": num_documents}


def test_a_folder_is_the_same_whatever_the_ranges(prepare_config, tmp_path, monkeypatch):
    documents = list(corpus_documents())
    for name, part in (("train", documents + documents[:30]), ("val", documents[:10])):
        (tmp_path / f"{name}.jsonl.zst").write_bytes(encode_jsonl_zst(part))
    config = dataclasses.replace(
        prepare_config, source=str(tmp_path / "*.zst"), remove_duplicates=True, workers=1
    )
    expected = contents(prepare(config, quiet))
    monkeypatch.setattr(duplicates, "_PARTITION_DOCUMENTS", 9)
    small = dataclasses.replace(config, data=str(tmp_path / "small"))
    assert contents(prepare(small, quiet)) == expected
