"""Beam search against all texts there are, and what its options promise."""

import itertools

import numpy as np
import pytest

from tests.generation.conftest import MAX_LENGTH, VOCABULARY
from tfbig.errors import UserError
from tfbig.generation.beam_search import BeamOptions, beam_search
from tfbig.generation.completion import Completion
from tfbig.generation.engine import Engine, write_all
from tfbig.generation.sampling import SamplingOptions, log_probabilities

PROMPT, END = [3, 1, 4, 1, 5], 7


def search(trainer, max_tokens, end_tokens=frozenset(), **options):
    return beam_search(trainer, PROMPT, BeamOptions(**options), max_tokens, end_tokens, MAX_LENGTH)


@pytest.fixture(scope="module")
def all_texts(next_logits):
    """Every text of at most 2 tokens with its log probability, ended or not."""
    first = log_probabilities(next_logits(PROMPT))
    second = {k: log_probabilities(next_logits([*PROMPT, k])) for k in range(VOCABULARY)}
    ended = {(): (first[END], 1)}
    for a, b in itertools.product(range(VOCABULARY), repeat=2):
        if a != END:
            tokens = (a,) if b == END else (a, b)
            ended[tokens] = (first[a] + second[a][b], 2)
    return ended


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
def test_enough_beams_find_the_best_texts(trainer, all_texts, length_penalty):
    found = search(
        trainer, 2, frozenset({END}), num_beams=VOCABULARY, length_penalty=length_penalty,
        early_stopping="never",
    )  # fmt: skip
    scores = {t: total / n**length_penalty for t, (total, n) in all_texts.items()}
    best = sorted(scores, key=lambda t: -scores[t])[:VOCABULARY]
    assert [h.tokens for h in found[:5]] == best[:5]
    np.testing.assert_allclose([h.score for h in found[:5]], [scores[t] for t in best[:5]], 1e-4)


def test_one_beam_is_greedy(trainer):
    completion = Completion(PROMPT, SamplingOptions(temperature=0), 12)
    write_all(Engine(trainer, 1, MAX_LENGTH), [completion])
    (found,) = search(trainer, 12, num_beams=1)
    assert list(found.tokens) == completion.written


def test_scores_are_those_of_the_texts(trainer, next_logits):
    for found in search(trainer, 6, num_beams=3):
        total, text = 0.0, list(PROMPT)
        for token in found.tokens:
            total += log_probabilities(next_logits(text))[token]
            text.append(token)
        assert found.score == pytest.approx(total / len(found.tokens), abs=1e-4)


def test_more_beams_find_no_worse_text(trainer):
    one = search(trainer, 10, num_beams=1)[0].score
    assert search(trainer, 10, num_beams=6)[0].score >= one - 1e-6


def test_no_ngram_comes_twice(trainer):
    def repeats(tokens, size):
        text = [*PROMPT, *tokens]
        ngrams = [tuple(text[k : k + size]) for k in range(len(text) - size + 1)]
        return len(ngrams) - len(set(ngrams))

    # The prompt itself has no repetition of two.
    found = search(trainer, 40, num_beams=3, no_repeat_ngram_size=2)
    assert all(repeats(h.tokens, 2) == 0 for h in found)
    assert any(repeats(h.tokens, 2) for h in search(trainer, 40, num_beams=3))


def test_min_tokens_and_early_stopping(trainer):
    ends = frozenset(range(0, VOCABULARY, 2))  # every second token ends
    for found in search(trainer, 12, ends, num_beams=4, min_tokens=5):
        assert len(found.tokens) >= 5
    early = search(trainer, 30, ends, num_beams=4, early_stopping=True)
    patient = search(trainer, 30, ends, num_beams=4, early_stopping="never")
    assert patient[0].score >= early[0].score - 1e-9


def test_bad_options(trainer):
    for options in (
        {"num_beams": 0},
        {"num_beams": 100_000},
        {"no_repeat_ngram_size": -1},
        {"length_penalty": np.inf},
    ):
        with pytest.raises(UserError):
            BeamOptions(**options)
    with pytest.raises(UserError, match="beam search forgets nothing"):
        search(trainer, MAX_LENGTH)
