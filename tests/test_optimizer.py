"""The update rule against its paper, and what a skipped update leaves alone."""

import numpy as np
import pytest
import tensorflow as tf

from tfbig.config import OptimizerConfig
from tfbig.optimizer import Optimizer, decide, squared_norm

DECAYED = {"kernel": True, "bias": False}


def make(config: OptimizerConfig):
    random = np.random.default_rng(0)
    values = {path: random.normal(size=(4, 3)).astype(np.float32) for path in DECAYED}
    variables = {path: tf.Variable(value) for path, value in values.items()}
    return values, variables, Optimizer(config, variables, DECAYED)


def gradients_of(step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(step + 10)
    return {path: random.normal(size=(4, 3)).astype(np.float32) * 50 for path in DECAYED}


def update(config, optimizer, gradients, num_tokens=10.0, loss_sum=20.0, max_loss=0.0, rate=0.1):
    gradients = {path: tf.constant(value) for path, value in gradients.items()}
    decision = decide(
        config,
        squared_norm(gradients),
        tf.constant(loss_sum),
        tf.constant(num_tokens),
        tf.constant(max_loss),
    )
    optimizer.apply(gradients, tf.constant(rate), decision)
    return decision


def test_adamw_equals_its_paper():
    config = OptimizerConfig(
        optimizer="adamw", epsilon=1e-2, weight_decay=0.3, clip_norm=1.5, beta1=0.8, beta2=0.9
    )
    expected, variables, optimizer = make(config)
    expected = {path: value.astype(np.float64) for path, value in expected.items()}
    m = {path: np.zeros((4, 3)) for path in expected}
    v = {path: np.zeros((4, 3)) for path in expected}
    for step in range(5):
        gradients = gradients_of(step)
        decision = update(config, optimizer, gradients)
        mean = {path: g.astype(np.float64) / 10 for path, g in gradients.items()}
        norm = np.sqrt(sum((g**2).sum() for g in mean.values()))
        assert float(decision.grad_norm) == pytest.approx(norm, rel=1e-5)
        for path, gradient in mean.items():
            gradient = gradient * min(1, 1.5 / norm)
            m[path] = 0.8 * m[path] + 0.2 * gradient
            v[path] = 0.9 * v[path] + 0.1 * gradient**2
            m_hat, v_hat = m[path] / (1 - 0.8 ** (step + 1)), v[path] / (1 - 0.9 ** (step + 1))
            decay = 0.3 * expected[path] if DECAYED[path] else 0
            expected[path] = expected[path] - 0.1 * (m_hat / (np.sqrt(v_hat) + 1e-2) + decay)
    for path, variable in variables.items():
        np.testing.assert_allclose(variable.numpy(), expected[path], rtol=2e-5, atol=2e-6)
    assert int(optimizer.iterations) == 5


def test_sgd_divides_once_by_the_tokens():
    config = OptimizerConfig(optimizer="sgd", weight_decay=0.0, clip_norm=0.0)
    before, variables, optimizer = make(config)
    gradients = gradients_of(0)
    update(config, optimizer, gradients, num_tokens=25.0)
    for path, variable in variables.items():
        np.testing.assert_allclose(
            variable.numpy(), before[path] - 0.1 * gradients[path] / 25, rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("rule", ["adamw", "sgd"])
@pytest.mark.parametrize("why", ["nan", "inf", "loss", "max_loss", "no_tokens"])
def test_a_skipped_update_leaves_everything_as_it_was(rule, why):
    config = OptimizerConfig(optimizer=rule)
    _, variables, optimizer = make(config)
    assert bool(update(config, optimizer, gradients_of(0)).applied)
    state = {path: v.numpy() for path, v in (variables | optimizer.state()).items()}
    gradients = gradients_of(1)
    options = {}
    if why == "nan":
        gradients["kernel"][0, 0] = np.nan
    elif why == "inf":
        gradients["bias"][1, 1] = np.inf
    elif why == "loss":
        options = {"loss_sum": np.nan}
    elif why == "max_loss":
        options = {"max_loss": 1.9}  # the mean loss is 2
    else:
        options = {"num_tokens": 0.0}
    decision = update(config, optimizer, gradients, **options)
    assert not bool(decision.applied)
    for path, variable in (variables | optimizer.state()).items():
        np.testing.assert_array_equal(variable.numpy(), state[path])
    assert bool(update(config, optimizer, gradients_of(2), max_loss=2.1).applied)


def test_without_slots_there_are_none():
    variables = {"kernel": tf.Variable([1.0])}
    optimizer = Optimizer(OptimizerConfig(), variables, DECAYED, with_slots=False)
    assert list(optimizer.state()) == ["optimizer/iterations"]
