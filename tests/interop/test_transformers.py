"""Our models against transformers' own, with random weights. Runs where PyTorch is installed."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.interop.configurations import CONFIGURATIONS, FOLDED
from tests.interop.reference_models import logits_of, reference_model, some_tokens
from tests.interop.test_hugging_face import filled_model
from tfbig.interop.hugging_face_export import ExportedTokenizer, write_folder
from tfbig.interop.hugging_face_folder import HuggingFaceFolder

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

TOKENIZER = ExportedTokenizer(b"{}", 391, "<|endoftext|>", 0)
MAX_DIFFERENCE = 2e-5


def length_of(fields: dict) -> int:
    return min(fields.get("n_positions", 0) or fields.get("max_position_embeddings", 0), 1100)


def same_tensors(first, second) -> None:
    ones, others = first.state_dict(), second.state_dict()
    assert ones.keys() == others.keys()
    for name, value in ones.items():
        assert torch.equal(value, others[name]), name


@pytest.mark.parametrize("title", CONFIGURATIONS)
def test_logits_there_and_back(title, tmp_path):
    """In: the same logits. Out again: a folder that transformers loads with the same tensors."""
    fields = CONFIGURATIONS[title]
    reference = reference_model(fields)
    reference.save_pretrained(tmp_path / "theirs")
    folder = HuggingFaceFolder(tmp_path / "theirs")
    tokens = some_tokens(fields["vocab_size"], 2, length_of(fields))
    expected = logits_of(reference, tokens)
    logits = filled_model(folder)(tokens).numpy()
    assert expected.std() > 0.1, "logits that are all alike would prove nothing"
    assert np.abs(logits - expected).max() <= MAX_DIFFERENCE

    (tmp_path / "ours").mkdir()
    write_folder(tmp_path / "ours", folder, folder.model, TOKENIZER)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert np.abs(logits_of(loaded.eval(), tokens) - expected).max() <= MAX_DIFFERENCE
    if title not in FOLDED:
        same_tensors(reference, loaded)


@pytest.mark.parametrize("title", ["gpt2 n_inner", "gpt2 untied", "neox", "neox sequential"])
def test_greedy_ids_are_equal(title, tmp_path):
    """What transformers' generate writes from our folder is what our own decoding writes."""
    from tfbig.config import Config, ParallelConfig
    from tfbig.generation.generator import generate_tokens
    from tfbig.generation.sampling import SamplingOptions
    from trainers.single import SingleTrainer

    reference_model(CONFIGURATIONS[title], seed=3).save_pretrained(tmp_path / "theirs")
    folder = HuggingFaceFolder(tmp_path / "theirs")
    vocab_size = 320  # of the tokenizer: the rows beyond must never be chosen
    (tmp_path / "ours").mkdir()
    described = ExportedTokenizer(b"{}", vocab_size, "<|endoftext|>", 0)
    write_folder(tmp_path / "ours", folder, folder.model, described)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()

    trainer = SingleTrainer(Config(model=folder.model, parallel=ParallelConfig()))
    trainer.build(training=False, vocab_size=vocab_size)
    assert trainer.load_state(folder, weights_only=True) == []
    for seed in range(3):
        prompt = some_tokens(vocab_size, 1, 7, seed)
        theirs = loaded.generate(
            torch.tensor(prompt.astype(np.int64)), max_new_tokens=30, do_sample=False
        )[0, 7:].tolist()
        ours = list(
            generate_tokens(
                trainer,
                prompt[0].tolist(),
                SamplingOptions(temperature=0),
                max_length=folder.model.max_length,
                max_tokens=30,
                end_token=0,
            )
        )
        assert ours == [token for token in theirs if token != 0] and len(ours) > 3
    trainer.close()


BEAMS = {
    "plain": {},
    "long texts": {"length_penalty": 2.0},
    "short texts": {"length_penalty": -1.0, "early_stopping": "never"},
    "no repetition": {"no_repeat_ngram_size": 2},
    "at least": {"min_tokens": 5, "early_stopping": True},
}


@pytest.mark.parametrize("title", BEAMS)
def test_beam_search_finds_the_same_texts(title, tmp_path):
    from tfbig.config import Config, ParallelConfig
    from tfbig.generation.beam_search import BeamOptions, beam_search
    from trainers.single import SingleTrainer

    reference = reference_model(CONFIGURATIONS["neox"], seed=3)
    reference.save_pretrained(tmp_path / "theirs")
    folder = HuggingFaceFolder(tmp_path / "theirs")
    trainer = SingleTrainer(Config(model=folder.model, parallel=ParallelConfig()))
    trainer.build(training=False, vocab_size=CONFIGURATIONS["neox"]["vocab_size"])
    trainer.load_state(folder, weights_only=True)
    options = BeamOptions(num_beams=4, **BEAMS[title])
    for seed in range(3):
        prompt = some_tokens(320, 1, 7, seed)
        ids = torch.tensor(prompt.astype(np.int64))
        # A token that comes early in the greedy text ends texts: some beams end, others do not.
        greedy = reference.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
        end = int(greedy[0, -1])
        theirs = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            num_beams=options.num_beams,
            do_sample=False,
            length_penalty=options.length_penalty,
            no_repeat_ngram_size=options.no_repeat_ngram_size,
            min_new_tokens=options.min_tokens,
            early_stopping=options.early_stopping,
            eos_token_id=end,
            pad_token_id=end,
        )[0, 7:].tolist()
        best = beam_search(
            trainer, prompt[0].tolist(), options, 12, frozenset({end}), folder.model.max_length
        )[0]
        assert list(best.tokens) == [token for token in theirs if token != end]
    trainer.close()


def test_several_files_are_loaded(tmp_path):
    reference = reference_model(CONFIGURATIONS["neox"])
    reference.save_pretrained(tmp_path / "theirs", max_shard_size="30KB")
    assert len(list((tmp_path / "theirs").glob("model-*.safetensors"))) > 2
    folder = HuggingFaceFolder(tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    write_folder(tmp_path / "ours", folder, folder.model, TOKENIZER, max_shard_bytes=30_000)
    assert len(list((tmp_path / "ours").glob("model-*.safetensors"))) > 2
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    same_tensors(reference, loaded)


def test_the_tokenizer_gives_the_same_ids(tmp_path, small_data):
    from data_pipeline.tokenizer import Tokenizer

    folder = HuggingFaceFolder(Path(__file__).parent / "golden" / "gpt_neox")
    contents = (Path(small_data) / "tokenizer.json").read_bytes()
    ours = Tokenizer(contents)
    (tmp_path / "ours").mkdir()
    described = ExportedTokenizer(contents, ours.vocab_size, "<|endoftext|>", ours.end_of_text_id)
    write_folder(tmp_path / "ours", folder, folder.model, described)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    for text in (
        "def main():\n    return 1",
        " leading space",
        "naïve 日本語 \t\n\n x",
        "isn't it",
    ):
        assert theirs(text)["input_ids"] == ours.encode(text).tolist()
        assert theirs.decode(theirs(text)["input_ids"]) == text
    assert theirs.eos_token_id == ours.end_of_text_id
    settings = json.loads((tmp_path / "ours" / "tokenizer_config.json").read_text())
    assert settings["model_max_length"] == folder.model.max_length
