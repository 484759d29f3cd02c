"""Many texts at once: each as if it were alone, as the model without a cache would write it."""

import numpy as np
import pytest

from tests.generation.conftest import MAX_LENGTH, VOCABULARY
from tfbig.generation.completion import Completion
from tfbig.generation.engine import Engine, write_all
from tfbig.generation.sampling import SamplingOptions, log_probabilities

GREEDY = SamplingOptions(temperature=0)
RANDOM = np.random.default_rng(4)
PROMPTS = [RANDOM.integers(0, VOCABULARY, n).tolist() for n in (3, 70, 1, 8, 9, 100, 64, 20, 5, 2)]


def written(trainer, completions, num_rows=8):
    write_all(Engine(trainer, num_rows, MAX_LENGTH), completions)
    return [completion.written for completion in completions]


def test_greedy_is_the_models_own_choice(trainer, next_logits):
    completions = [Completion(prompt, GREEDY, 12, num_top_logprobs=2) for prompt in PROMPTS]
    write_all(Engine(trainer, 3, MAX_LENGTH), completions)  # more texts than rows
    for completion in completions:
        assert completion.finish_reason == "length" and len(completion.written) == 12
        text = list(completion.prompt)
        for token, logprobs in zip(completion.written, completion.logprobs, strict=True):
            logits = next_logits(text)
            assert token == int(np.argmax(logits))
            expected = log_probabilities(logits)
            assert logprobs.logprob == pytest.approx(expected[token], abs=1e-4)
            assert [k for k, _ in logprobs.top] == np.argsort(-expected)[:2].tolist()
            text.append(token)


@pytest.mark.parametrize("options", [GREEDY, SamplingOptions(temperature=1.2, top_p=0.9, seed=7)])
def test_a_text_does_not_depend_on_its_neighbours(trainer, options):
    def completions():
        return [Completion(prompt, options, 25) for prompt in PROMPTS[:8]]

    together = written(trainer, completions())
    assert len({tuple(ids) for ids in together}) == 8
    for alone, expected in zip(completions(), together, strict=True):
        assert written(trainer, [alone])[0] == expected
    late = Engine(trainer, 8, MAX_LENGTH)
    first, second = completions()[:2]
    late.add(first)
    for _ in range(5):
        late.step()
    write_all(late, [second])  # joins while the first is under way
    assert [first.written, second.written] == together[:2]


@pytest.mark.parametrize("num_rows", [1, 2, 8])
def test_texts_of_one_prompt_share_its_passage(trainer, num_rows):
    options = SamplingOptions(seed=3)
    prompt = PROMPTS[1]
    shared = [Completion(prompt, options, 10, choice=k) for k in range(4)]
    other = Completion(PROMPTS[3], options, 10)
    apart = [Completion(list(prompt), options, 10, choice=k) for k in range(4)]
    engine = Engine(trainer, num_rows, MAX_LENGTH)
    calls = []
    plain = engine._decode
    engine._decode = lambda tokens, valid: calls.append(tokens.shape[1]) or plain(tokens, valid)
    write_all(engine, [*shared, other])
    assert [c.written for c in shared] == written(trainer, apart, num_rows)
    assert len({tuple(c.written) for c in shared}) == 4
    times = sum(width == 256 for width in calls)  # the prompt's one wide piece
    assert times == max(1, 4 // num_rows)


def test_ends(trainer):
    free = written(trainer, [Completion(PROMPTS[0], GREEDY, 20)])[0]
    end = next(token for k, token in enumerate(free) if token not in free[:k] and k >= 2)
    completion = Completion(PROMPTS[0], GREEDY, 20, frozenset({end}))
    assert written(trainer, [completion])[0] == free[: free.index(end)]
    assert completion.finish_reason == "stop"
    longest = Completion(PROMPTS[0], GREEDY, MAX_LENGTH - len(PROMPTS[0]))
    assert len(written(trainer, [longest])[0]) == MAX_LENGTH - len(PROMPTS[0])
    with pytest.raises(AssertionError, match="longer than"):
        Engine(trainer, 1, MAX_LENGTH).add(Completion(PROMPTS[0], GREEDY, MAX_LENGTH))


def test_what_is_cancelled_frees_its_row(trainer):
    engine = Engine(trainer, 1, MAX_LENGTH)
    first, waiting, last = (Completion(PROMPTS[k], GREEDY, 30) for k in (0, 1, 3))
    for completion in (first, waiting, last):
        engine.add(completion)
    assert engine.step() == [first] and engine.num_running == 1 and engine.num_waiting == 2
    first.finish("cancelled")
    waiting.finish("cancelled")
    assert set(engine.step()) == {first, waiting, last}
    assert len(first.written) == 2 and not waiting.written
    while not engine.idle:
        engine.step()
    assert last.written == written(trainer, [Completion(PROMPTS[3], GREEDY, 30)])[0]
    half_fed = Completion(PROMPTS[5], GREEDY, 5)
    engine.add(half_fed)
    half_fed.finish("cancelled")
    engine.step()
    assert engine.idle
