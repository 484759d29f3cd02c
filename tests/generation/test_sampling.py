"""Filters and penalties against their definitions, draws against the distribution."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfbig.errors import UserError
from tfbig.generation.sampling import (
    Sampler,
    SamplingOptions,
    log_probabilities,
    probabilities,
    token_logprobs,
)

LOGITS = np.array([1.0, 3.0, -2.0, 2.5, 0.0, 2.5, -math.inf])


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def by_definition(logits: np.ndarray, options: SamplingOptions) -> np.ndarray:
    """Token by token, as the papers state the filters."""
    weights = softmax(logits / options.temperature)
    order = sorted(range(len(weights)), key=lambda k: (-weights[k], k))
    if options.top_k:
        order = order[: options.top_k]
    weights = np.array([w if k in order else 0.0 for k, w in enumerate(weights)])
    weights /= weights.sum()
    kept, total = [], 0.0
    for k in order:
        if total >= options.top_p:
            break
        kept.append(k)
        total += weights[k]
    weights = np.array([w if k in kept else 0.0 for k, w in enumerate(weights)])
    weights /= weights.sum()
    weights[weights < options.min_p * weights.max()] = 0.0
    return weights / weights.sum()


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 1 << 20),
    size=st.sampled_from([2, 7, 40]),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 100]),
    top_p=st.sampled_from([0.1, 0.5, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.9]),
)
def test_filters_are_their_definitions(seed, size, temperature, top_k, top_p, min_p):
    logits = np.random.default_rng(seed).normal(0, 2, size)
    options = SamplingOptions(temperature, top_k, top_p, min_p=min_p)
    expected = by_definition(logits, options)
    np.testing.assert_allclose(probabilities(logits, options), expected, atol=1e-12)


@pytest.mark.parametrize("top_p", [0.4, 0.999])
def test_a_nucleus_of_a_large_vocabulary(top_p):
    """Found among the likeliest tokens where it lies there, and among all where it does not."""
    logits = np.random.default_rng(0).normal(0, 3, 5000)
    options = SamplingOptions(top_p=top_p)
    weights = softmax(logits)
    order = np.argsort(-weights)
    count = int(np.searchsorted(np.cumsum(weights[order]), top_p)) + 1
    assert (count > 1024) == (top_p > 0.9)
    found = probabilities(logits, options)
    assert set(np.flatnonzero(found)) == set(order[:count].tolist())


def test_ties_go_to_lower_ids():
    assert np.flatnonzero(probabilities(LOGITS, SamplingOptions(top_k=2))).tolist() == [1, 3]
    assert Sampler(SamplingOptions(temperature=0)).choose(np.array([1.0, 2.0, 2.0])) == 1


def test_draws_follow_the_distribution():
    options = SamplingOptions(temperature=0.8, top_p=0.97, seed=11)
    expected = probabilities(LOGITS, options)
    sampler = Sampler(options)
    count = 20_000
    drawn = np.bincount([sampler.choose(LOGITS) for _ in range(count)], minlength=len(LOGITS))
    assert np.all(drawn[expected == 0] == 0)
    kept = expected > 0
    chi_square = np.sum((drawn[kept] - count * expected[kept]) ** 2 / (count * expected[kept]))
    # Degrees of freedom: kept - 1 = 3; beyond 16.3 with probability 0.001.
    assert kept.sum() == 4 and chi_square < 16.3


def test_a_seed_and_choice_fix_the_draws():
    def draws(**fields):
        choice = fields.pop("choice", 0)
        sampler = Sampler(SamplingOptions(**fields), choice=choice)
        return [sampler.choose(LOGITS) for _ in range(30)]

    assert draws(seed=1) == draws(seed=1)
    assert draws(seed=1) != draws(seed=2)
    assert draws(seed=1, choice=1) != draws(seed=1)
    assert draws(seed=1, choice=1) == draws(seed=1, choice=1)


def test_penalties():
    options = SamplingOptions(
        temperature=0, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25,
        logit_bias={4: 0.125},
    )  # fmt: skip
    sampler = Sampler(options, prompt=[0, 2])
    expected = LOGITS.copy()
    expected[0], expected[2] = 0.5, -4.0  # divided above zero, multiplied below
    expected[4] += 0.125
    np.testing.assert_array_equal(sampler.penalised(LOGITS), expected)
    assert [sampler.choose(LOGITS) for _ in range(3)] == [1, 3, 5]
    assert sampler.choose(LOGITS) == 1  # 1.5 - 0.75, against 0.5 of the prompt's and 0.125
    found = sampler.penalised(LOGITS)
    assert found[1] == 3.0 / 2 - 0.5 - 2 * 0.25 and found[3] == 2.5 / 2 - 0.5 - 0.25


def test_no_end_before_min_tokens():
    sampler = Sampler(SamplingOptions(temperature=0, min_tokens=2), end_tokens=[1])
    assert [sampler.choose(LOGITS) for _ in range(3)] == [3, 3, 1]


def test_log_probabilities_are_the_models_own():
    np.testing.assert_allclose(np.exp(log_probabilities(LOGITS)), softmax(LOGITS))
    found = token_logprobs(LOGITS, 4, 3)
    assert [token for token, _ in found.top] == [1, 3, 5]
    assert found.logprob == pytest.approx(math.log(softmax(LOGITS)[4]))
    assert token_logprobs(LOGITS, 4, 0).top == ()


def test_extreme_values():
    sampler = Sampler(SamplingOptions(temperature=1e-300))
    assert sampler.choose(LOGITS) == 1
    assert probabilities(LOGITS * 1e300, SamplingOptions()).argmax() == 1
    biased = Sampler(SamplingOptions(logit_bias={6: 100.0}))
    assert biased.choose(LOGITS) != 6, "what the vocabulary lacks stays out"


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -1.0}, {"temperature": math.nan}, {"top_k": -1}, {"top_p": 0.0},
        {"seed": -1}, {"min_p": 1.5}, {"repetition_penalty": 0.0},
        {"presence_penalty": math.inf}, {"logit_bias": {1: math.nan}}, {"min_tokens": -1},
    ],
)  # fmt: skip
def test_bad_options(fields):
    with pytest.raises(UserError):
        dataclasses.replace(SamplingOptions(), **fields)
