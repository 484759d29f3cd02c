"""The adapter of lm-evaluation-harness against sums over our model's own logits."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from tests.conftest import SMALL_VOCABULARY

pytest.importorskip("lm_eval.api.model")

from data_pipeline.tokenizer import Tokenizer
from tfbig.config import Config, ModelConfig
from tfbig.interop.lm_evaluation import TrainerModel, evaluate_tasks

LENGTH, BATCH = 24, 4


@pytest.fixture(scope="module")
def tokenizer(small_data) -> Tokenizer:
    return Tokenizer.load(small_data)


@pytest.fixture(scope="module")
def trainer():
    from trainers.single import SingleTrainer

    model = ModelConfig(
        vocab_size=SMALL_VOCABULARY, max_length=LENGTH, embed_dim=32, num_layers=1, num_heads=2
    )
    trainer = SingleTrainer(Config(model=model))
    trainer.build(training=False)
    random = np.random.default_rng(0)
    for variable in trainer.model.canonical_variables().values():
        variable.assign(random.normal(size=variable.shape) * 0.3)
    return trainer


@pytest.fixture(scope="module")
def adapter(trainer, tokenizer) -> TrainerModel:
    return TrainerModel(trainer, tokenizer, LENGTH, BATCH)


def request(*arguments):
    return SimpleNamespace(args=arguments)


def expected_score(trainer, read: list[int], scored: list[int]) -> tuple[float, bool]:
    text = [*read, *scored][-(LENGTH + 1) :]
    logits = trainer.model(np.array([text[:-1]], np.int32)).numpy()[0].astype(np.float64)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    count = min(len(scored), LENGTH)
    labels = np.array(text[-count:])
    chosen = logits[-count:]
    return float(chosen[np.arange(count), labels].sum()), bool((chosen.argmax(-1) == labels).all())


def test_likelihoods_are_sums_over_the_continuation(adapter, trainer, tokenizer):
    encode = lambda text: tokenizer.encode(text).tolist()  # noqa: E731
    cases = [("def main", "(x):"), ("", "import"), ("a = ", "b"), ("x" * 60, "yz"), ("self", ".a")]
    found = adapter.loglikelihood([request(*case) for case in cases])
    assert len(found) == len(cases)
    for (context, continuation), (score, is_greedy) in zip(cases, found, strict=True):
        if not context:
            read, scored = [tokenizer.end_of_text_id], encode(continuation)
        else:
            read = encode(context.rstrip())
            scored = encode(context + continuation)[len(read) :]
        expected, greedy = expected_score(trainer, read, scored)
        assert score == pytest.approx(expected, abs=1e-4) and is_greedy == greedy


def test_the_greedy_continuation_is_known_as_such(adapter, trainer, tokenizer):
    text = adapter.generate_until([request("def", {"until": [], "max_gen_toks": 1})])[0]
    if tokenizer.encode("def" + text).tolist()[:-1] == tokenizer.encode("def").tolist():
        assert adapter.loglikelihood([request("def", text)])[0][1]
    assert not adapter.loglikelihood([request("def", " zzz zzz")])[0][1]


def test_rolling_likelihoods_count_each_token_once(adapter, trainer, tokenizer):
    text = "def function(argument):\n    return [argument for _ in range(3)]\n" * 2
    tokens = [tokenizer.end_of_text_id, *tokenizer.encode(text).tolist()]
    assert len(tokens) > 2 * LENGTH
    total, place = 0.0, 0
    while place < len(tokens) - 1:
        stop = min(place + LENGTH, len(tokens) - 1)
        count = stop - place
        # The last window is as long as the others; only what is new counts.
        start = max(0, stop - LENGTH) if place else 0
        total += expected_score(trainer, tokens[start : place + 1], tokens[place + 1 : stop + 1])[0]
        place += count
    (found,) = adapter.loglikelihood_rolling([request(text)])
    assert found == pytest.approx(total, abs=1e-3)


def test_generation_ends_at_a_stop_string(adapter):
    options = {"until": [], "max_gen_toks": 12}
    (whole,) = adapter.generate_until([request("import", options)])
    assert whole
    stop = whole[len(whole) // 2]
    (cut,) = adapter.generate_until([request("import", options | {"until": [stop]})])
    assert cut == whole[: whole.index(stop)]


def test_a_local_task_runs(trainer, tokenizer, tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "data.jsonl").write_text(
        "".join(
            json.dumps({"q": f"{n} + 1 =", "a": [" 1", " 2"], "y": n % 2}) + "\n" for n in (0, 1)
        )
    )
    (tmp_path / "sums.yaml").write_text(
        "task: tfbig_sums\ndataset_path: json\ndataset_kwargs:\n  data_files:\n"
        f"    test: {tmp_path}/data.jsonl\ntest_split: test\noutput_type: multiple_choice\n"
        'doc_to_text: "{{q}}"\ndoc_to_choice: "{{a}}"\ndoc_to_target: "{{y}}"\n'
        "metric_list:\n  - metric: acc\n"
    )
    results = evaluate_tasks(trainer, tokenizer, LENGTH, BATCH, ["tfbig_sums"], str(tmp_path))
    assert 0 <= results["tfbig_sums"]["acc,none"] <= 1
