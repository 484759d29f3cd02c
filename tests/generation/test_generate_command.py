"""`tfbig generate` with several prompts and texts, and by several ranks."""

import json

import pytest

from tests.distributed.launch import horovodrun
from tests.error_line import line_of
from tfbig import generate
from tfbig.command_config import GenerateConfig
from tfbig.errors import UserError

PROMPTS = ["def ", "import os\nimport ", "é"]


def text(short_run: str, **options) -> str:
    return generate.run(GenerateConfig(run=short_run, max_tokens=12, **options), {})


def lines(short_run: str, **options) -> list[dict]:
    return [json.loads(line) for line in text(short_run, **options).splitlines()]


def test_many_texts(short_run, tmp_path):
    """The first text of each prompt is what it is alone; nine texts do not fit into the rows."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    found = lines(short_run, prompts_file=str(path), num_texts=3, sampling_seed=4)
    assert [entry["prompt"] for entry in found] == [p for p in PROMPTS for _ in range(3)]
    for entry, prompt in zip(found[::3], PROMPTS, strict=True):
        assert entry["text"] == text(short_run, prompt=prompt, sampling_seed=4)
    assert len({entry["text"] for entry in found[:3]}) == 3
    assert all(entry["finish_reason"] == "length" for entry in found)
    plain = tmp_path / "prompts.txt"
    plain.write_text("def \né\n")
    again = lines(short_run, prompts_file=str(plain), sampling_seed=4)
    assert [entry["text"] for entry in again] == [found[0]["text"], found[6]["text"]]
    stop = found[0]["text"][4:6]
    stopped = lines(short_run, prompts_file=str(plain), sampling_seed=4, stop=(stop,))[0]
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == found[0]["text"][: found[0]["text"].index(stop)]
    for contents, words in (("", "is empty"), ("3\n", "line 1 is no JSON string")):
        path.write_text(contents)
        with pytest.raises(UserError, match=words):
            text(short_run, prompts_file=str(path))


def test_logprobs(short_run):
    (entry,) = lines(short_run, prompt="def ", logprobs=3, temperature=0.0)
    assert entry["text"] == text(short_run, prompt="def ", temperature=0.0)
    assert len(entry["logprobs"]) == 12
    for token in entry["logprobs"]:
        assert token["logprob"] == max(token["top"].values()) and token["text"] in token["top"]


def test_biases_and_the_least_tokens(short_run):
    from data_pipeline.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(f"{short_run}/tokenizer.json")
    end, (letter,) = tokenizer.end_of_text_id, tokenizer.encode("q").tolist()
    assert text(short_run, prompt="a", logit_bias=(f"{letter}:100",)) == "q" * 12
    biases = (f"{end}:200", f"{letter}:100")
    assert text(short_run, prompt="a", logit_bias=biases) == ""
    assert text(short_run, prompt="a", logit_bias=biases, min_tokens=5) == "q" * 5


def test_beams(short_run):
    options = {"prompt": "def ", "num_beams": 4}
    found = lines(short_run, num_texts=3, **options)
    scores = [entry["score"] for entry in found]
    assert scores == sorted(scores, reverse=True) and len({entry["text"] for entry in found}) == 3
    assert found[0]["text"] == text(short_run, **options)


def test_what_beams_are_told(short_run):
    """Each word of --early_stopping, and --min_tokens, as the search understands them."""
    told = []
    for word in ("false", "true", "never"):
        config = GenerateConfig(run=short_run, num_beams=2, min_tokens=3, early_stopping=word)
        _, beams = generate._options(config)
        told.append((beams.early_stopping, beams.min_tokens))
    assert told == [(False, 3), (True, 3), ("never", 3)]


BAD = {
    "texts": (["--num_texts=0"], "--num_texts=0 must be at least 1"),
    "logprobs": (["--logprobs=21"], "must be at least -1 and at most 20"),
    "bias": (["--logit_bias=a:1"], "--logit_bias=a:1 is no TOKEN:BIAS"),
    "biased token": (["--logit_bias=99999:1"], "names no token: give an id below"),
    "bias of beams": (
        ["--num_beams=2", "--logit_bias=1:1"],
        "--logit_bias is not for beam search",
    ),
    "least tokens": (["--min_tokens=-1"], "--min_tokens=-1 must be at least 0"),
    "few beams": (
        ["--num_beams=2", "--num_texts=3"],
        "--num_texts=3 is more than the --num_beams=2",
    ),
    "prompts": (["--prompts_file=nowhere"], "--prompts_file=nowhere cannot be read"),
    "two kinds of prompts": (
        ["--prompts_file=nowhere", "--prompt=a"],
        "--prompt and --prompts_file are two",
    ),
    "long texts": (["--num_texts=2", "--max_tokens=9999"], "give at most"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_flags(name, short_run, capsys):
    flags, words = BAD[name]
    assert words in line_of(generate.main, [f"--run={short_run}", *flags], capsys, "generate")


@pytest.mark.distributed
@pytest.mark.parametrize("degree", ["pipeline_parallel_degree", "tensor_parallel_degree"])
def test_two_ranks_write_what_one_writes(short_run, degree):
    """As printed: by rank 0 alone, by beam search and several at a time."""
    for options in (
        {"num_beams": 3, "num_texts": 2, "no_repeat_ngram_size": 2},
        {"num_texts": 3, "sampling_seed": 4},
    ):
        flags = [f"--{name}={value}" for name, value in options.items()]
        arguments = ["-m", "tfbig.generate", f"--run={short_run}", "--prompt=def ", *flags]
        layout = ["--strategy=pipeline", f"--{degree}=2"]
        done = horovodrun(2, [*arguments, "--max_tokens=12", *layout])
        assert done.returncode == 0, done.stdout
        printed = [line for line in done.stdout.splitlines() if '"prompt"' in line]
        printed = [json.loads(line[line.index("{") :]) for line in printed]
        expected = lines(short_run, prompt="def ", **options)
        for entry in (*printed, *expected):
            entry.pop("score", None)
        assert printed == expected
