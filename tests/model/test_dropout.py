"""Dropout's masks behave as independent coins along every coordinate they are keyed by."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tfbig.model.dropout import dropout, keep_mask, sample_keys

RATE, LENGTH, WIDTH = 0.3, 64, 96
SAMPLES = 24
LIMIT = 4.5  # standard deviations; a fair coin exceeds them once in 150,000 times


def mask(
    seed: int = 0, step: int = 0, layer: int = 0, site: int = 0, first_sample: int = 0
) -> np.ndarray:
    """Returns which elements survive, (samples, elements), as 0 and 1."""
    samples = tf.range(first_sample, first_sample + SAMPLES, dtype=tf.int64)
    keys = sample_keys(seed, tf.constant(step, tf.int64), layer, site, samples)
    index = tf.cast(tf.range(LENGTH * WIDTH), tf.uint32)
    return keep_mask(keys, index, RATE).numpy().astype(np.float64)


def z_of_agreement(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the correlation of two masks in standard deviations of independent coins."""
    variance = RATE * (1 - RATE)
    covariance = np.mean((a - (1 - RATE)) * (b - (1 - RATE)))
    return float(covariance / variance * np.sqrt(a.size))


@pytest.fixture(scope="module")
def base() -> np.ndarray:
    return mask()


def test_the_share_that_survives(base):
    expected, spread = 1 - RATE, np.sqrt(RATE * (1 - RATE))
    assert abs(base.mean() - expected) < LIMIT * spread / np.sqrt(base.size)
    for axis in (0, 1):  # of each element over the samples, of each sample over its elements
        means = base.mean(axis)
        deviation = (means - expected) / (spread / np.sqrt(base.shape[axis]))
        assert np.abs(deviation).max() < LIMIT + 1
        assert np.var(deviation) == pytest.approx(1, abs=LIMIT * np.sqrt(2 / means.size))


@pytest.mark.parametrize("distance", [1, 2, 3, 4, 8, 16, WIDTH, 2 * WIDTH, 1024])
def test_elements_and_positions_are_independent(base, distance):
    assert abs(z_of_agreement(base[:, :-distance], base[:, distance:])) < LIMIT


@pytest.mark.parametrize("distance", [1, 2, 3, 8, 16])
def test_samples_are_independent(base, distance):
    assert abs(z_of_agreement(base[:-distance], base[distance:])) < LIMIT


@pytest.mark.parametrize(
    "other",
    [
        {name: value}
        for name, values in {
            "seed": (1, 2, 2**31 - 1),
            "step": (1, 2, 3, 100, 2**31),
            "layer": (1, 2, -1, 95),
            "site": (1, 2, 3),
            "first_sample": (SAMPLES, 2**32, 2**40),
        }.items()
        for value in values
    ],
    ids=str,
)
def test_other_keys_give_independent_masks(base, other):
    assert abs(z_of_agreement(base, mask(**other))) < LIMIT


def test_neighbouring_keys_do_not_shift_each_other(base):
    """A mask of the next step, layer or sample is not this one moved by a few elements."""
    for other in ({"step": 1}, {"layer": 1}, {"site": 1}, {"first_sample": 1}):
        moved = mask(**other)
        for shift in (1, 2, WIDTH):
            assert abs(z_of_agreement(base[:, shift:], moved[:, :-shift])) < LIMIT
            assert abs(z_of_agreement(base[:, :-shift], moved[:, shift:])) < LIMIT


def test_all_pairs_of_a_small_grid(base):
    """Each of 2 x 2 x 2 x 2 x 2 neighbouring keys against each other one."""
    names = ("seed", "step", "layer", "site")
    masks = [
        mask(**dict(zip(names, key, strict=True))) for key in itertools.product((0, 1), repeat=4)
    ]
    scores = [z_of_agreement(a, b) for a, b in itertools.combinations(masks, 2)]
    assert np.abs(scores).max() < LIMIT
    assert np.std(scores) == pytest.approx(1, abs=0.35)


def test_values_are_scaled_and_the_mean_is_kept():
    x = tf.ones([SAMPLES, LENGTH, WIDTH])
    keys = sample_keys(3, tf.constant(5), 1, 2, tf.range(SAMPLES, dtype=tf.int64))
    dropped = dropout(x, keys, RATE).numpy()
    assert set(np.unique(dropped)) == {np.float32(0), np.float32(1 / (1 - RATE))}
    assert dropped.mean() == pytest.approx(1, abs=0.01)


def test_masks_are_those_of_any_part_and_of_compiled_code():
    x = tf.ones([4, 8, 6])
    samples = tf.range(4, dtype=tf.int64)

    def run(x, samples, first=0):
        return dropout(x, sample_keys(1, tf.constant(9), 3, 1, samples), RATE, first)

    whole = run(x, samples).numpy()
    compiled = tf.function(run, jit_compile=True)(x, samples).numpy()
    np.testing.assert_array_equal(compiled, whole)
    np.testing.assert_array_equal(run(x[2:], samples[2:]), whole[2:])
    np.testing.assert_array_equal(run(x[:, 5:], samples, 5), whole[:, 5:])
    half = run(tf.cast(x, tf.bfloat16), samples)
    np.testing.assert_array_equal(tf.cast(half, tf.float32).numpy() > 0, whole > 0)
