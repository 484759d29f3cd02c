"""The rule over flat slices is the rule over variables."""

import numpy as np
import pytest
import tensorflow as tf

from tfbig.config import OptimizerConfig
from tfbig.flat_optimizer import FlatOptimizer
from tfbig.optimizer import Decision, Optimizer

SIZE, DECAYED = 12, 7


def decision(applied: bool) -> Decision:
    scale = 0.25 if applied else 0.0
    flag = tf.constant(applied)
    return Decision(tf.constant(1.0), tf.constant(scale), flag, flag)


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("rule", ["adamw", "sgd"])
def test_equals_the_optimizer_of_variables_and_skips_like_it(rule, on_host):
    config = OptimizerConfig(optimizer=rule, weight_decay=0.1, ema_decay=0.9)
    random = np.random.default_rng(0)
    value = random.normal(size=SIZE).astype(np.float32)
    whole = {"a": tf.Variable(value[:DECAYED]), "b": tf.Variable(value[DECAYED:])}
    expected = Optimizer(config, whole, {"a": True, "b": False})
    flat = FlatOptimizer(config, [SIZE], [DECAYED], on_host=on_host)
    weights = tf.constant(value)
    flat.slots["ema/"][0].assign(value)
    for step, applied in enumerate([True, False, True, True]):
        gradient = random.normal(size=SIZE).astype(np.float32)
        if not applied:
            gradient[3] = np.nan
        parts = {"a": gradient[:DECAYED], "b": gradient[DECAYED:]}
        rate = tf.constant(0.1 / (step + 1))
        expected.apply({p: tf.constant(g) for p, g in parts.items()}, rate, decision(applied))
        before = weights
        weights = flat.updated(0, weights, tf.constant(gradient), rate, decision(applied))
        flat.count(decision(applied))
        if not applied:
            np.testing.assert_array_equal(weights, before)
        found = np.concatenate([whole["a"], whole["b"]])
        np.testing.assert_allclose(weights, found, rtol=1e-6, atol=1e-7)
    state = expected.state()
    for prefix, slots in flat.slots.items():
        found = np.concatenate([state[prefix + path] for path in ("a", "b")])
        np.testing.assert_allclose(slots[0], found, rtol=1e-6, atol=1e-7)
    assert int(flat.iterations) == int(state["optimizer/iterations"]) == 3
