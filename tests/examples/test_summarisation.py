"""The summarisation example, end to end on made-up dialogues. Needs rouge-score."""

import json

import pytest

pytest.importorskip("rouge_score")

from examples.summarisation.run_summarization import (
    SummarisationConfig,
    read_records,
    rouge,
    run,
)
from tfbig.errors import UserError


def test_it_beats_its_untuned_start_and_writes_the_usual_files(tmp_path):
    results = run(
        SummarisationConfig(
            output_dir=str(tmp_path / "out"),
            steps=100,
            max_predict_samples=3,
            max_target_length=24,
            sequence_length=96,
        )
    )
    folder = tmp_path / "out"
    written = {
        name: json.loads((folder / f"{name}_results.json").read_text())
        for name in ("train", "eval", "predict", "all")
    }
    speed = ["runtime", "samples", "samples_per_second", "steps_per_second"]
    measures = ["loss", "rouge1", "rouge2", "rougeL", "rougeLsum", "gen_len", *speed]
    totals = {"epoch", "total_flos"}
    assert written["train"].keys() == totals | {f"train_{name}" for name in ("loss", *speed)}
    assert written["eval"].keys() == {"epoch", *(f"eval_{name}" for name in measures)}
    assert written["predict"].keys() == {f"predict_{name}" for name in measures}
    assert written["eval"]["eval_loss"] > 0 and written["predict"]["predict_loss"] > 0
    assert written["eval"]["eval_loss"] != written["predict"]["predict_loss"]
    everything = {}
    for name in ("train", "eval", "predict"):
        everything |= written[name]
    assert everything.items() <= written["all"].items()
    predictions = (folder / "generated_predictions.txt").read_text().split("\n")
    assert len(predictions) == 3
    before, after = results["start"], results["predict"]
    for name in ("rouge1", "rouge2", "rougeL", "rougeLsum"):
        assert after[f"predict_{name}"] > before[f"start_{name}"] + 5


def test_rouge_is_that_of_the_definition():
    """By hand: 2 of 3 words of each side agree, and 1 of 2 pairs."""
    scores = rouge(["the cat sat", "a b"], ["the cat ran", "c d"])
    assert scores == {"rouge1": 33.3333, "rouge2": 25.0, "rougeL": 33.3333, "rougeLsum": 33.3333}


def test_records_without_the_fields_are_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"dialogue": "a", "summary": "b"}\n{"text": "c"}\n')
    with pytest.raises(UserError, match=r"a\.jsonl line 2 lacks"):
        read_records(path, SummarisationConfig())
    path.write_text('{"dialogue": "a", "summary": ""}\n{"dialogue": "c", "summary": "d"}\n')
    assert read_records(path, SummarisationConfig()) == [("c", "d")]
