"""Activations that keep their input alone: values, slopes, and what the backward pass reads."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tfbig.model.activation import gelu, gelu_tanh
from tfbig.model.fused import SMALLEST

PAIRS = [(gelu_tanh, True), (gelu, False)]
INPUTS = np.concatenate([np.linspace(-12, 12, 4001), [0.0, -0.0, 1e-30, 300.0, -300.0]])


def with_slope(function, x):
    x = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    return y.numpy(), tape.gradient(y, x).numpy()


def formula(x, approximate):
    """Returns GELU and its slope as the paper writes them, in float64."""
    if approximate:
        tanh = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
        inner = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
        return 0.5 * x * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * inner
    integral = 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return x * integral, integral + x * np.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)


@pytest.mark.parametrize("ours, approximate", PAIRS)
@pytest.mark.parametrize("dtype, tolerance", [(np.float64, 1e-12), (np.float32, 1e-5)])
def test_values_and_slopes_are_those_of_the_formula(ours, approximate, dtype, tolerance):
    found = with_slope(ours, INPUTS.astype(dtype))
    for a, b in zip(found, formula(INPUTS, approximate), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("ours, approximate", PAIRS)
@pytest.mark.parametrize("dtype, tolerance", [(tf.float16, 1e-3), (tf.bfloat16, 2e-2)])
def test_narrow_dtypes(ours, approximate, dtype, tolerance):
    exact = with_slope(ours, INPUTS.astype(np.float32))
    found = with_slope(ours, tf.cast(INPUTS, dtype))
    for a, b in zip(found, exact, strict=True):
        assert np.isfinite(a.astype(np.float32)).all()
        np.testing.assert_allclose(a.astype(np.float32), b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("ours, approximate", PAIRS)
@pytest.mark.parametrize(
    "dtype, tolerance", [(tf.float64, 1e-10), (tf.float32, 1e-5), (tf.bfloat16, 2e-2)]
)
def test_large_tensors_are_compiled_and_equal(ours, approximate, dtype, tolerance):
    x = tf.cast(np.linspace(-12, 12, SMALLEST), dtype)
    compiled = with_slope(ours, x)
    exact = formula(np.array(tf.cast(x, tf.float64)), approximate)
    for a, b in zip(compiled, exact, strict=True):
        np.testing.assert_allclose(a.astype(np.float64), b, rtol=tolerance, atol=tolerance)

    def calls(size: int) -> int:
        graph = tf.function(ours, autograph=False).get_concrete_function(tf.zeros([size])).graph
        return sum("Call" in op.type for op in graph.get_operations())

    assert calls(SMALLEST) == 1 and calls(SMALLEST - 1) == 0


@pytest.mark.parametrize("ours", [gelu, gelu_tanh])
def test_backward_reads_nothing_of_the_forward_pass_but_the_input(ours):
    @tf.function(autograph=False)
    def run(x, upstream):
        y = ours(x)
        inside = {op.name for op in tf.compat.v1.get_default_graph().get_operations()}
        slope = tf.gradients(y, x, upstream)[0]
        after = tf.compat.v1.get_default_graph().get_operations()[len(inside) :]
        read = [i for op in after for i in op.inputs if i.op.name in inside]
        # A custom gradient passes its input through, as the second result of this operation.
        read = {(i.op.inputs[1] if i.name == "IdentityN:1" else i).name for i in read}
        names = {x.name, upstream.name}
        assert read <= names, read - names
        return y, slope

    specs = [tf.TensorSpec([8], tf.float32)] * 2
    run.get_concrete_function(*specs)
