"""Layer norm against its formula: values, all three gradients, dtypes, what backward reads."""

import numpy as np
import pytest
import tensorflow as tf

from tfbig.model.layer_norm import layer_norm

SHAPE, EPSILON = (2, 5, 12), 1e-5


def tensors(dtype: str) -> list[tf.Tensor]:
    random = np.random.default_rng(0)
    x = 3.0 + 5.0 * random.normal(size=SHAPE)
    x[0, 0] = 7.0  # without variance
    return [tf.constant(v, dtype) for v in (x, *random.normal(size=(2, SHAPE[-1])))]


def formula(x, gamma, beta):
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return (x - mean) / tf.sqrt(variance + EPSILON) * gamma + beta


def with_gradients(function, arguments, upstream):
    with tf.GradientTape() as tape:
        tape.watch(arguments)
        y = function(*arguments)
    gradients = tape.gradient(y, arguments, output_gradients=tf.cast(upstream, y.dtype))
    return [np.array(tf.cast(v, tf.float64)) for v in (y, *gradients)]


@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-10), ("float32", 2e-5)])
def test_equals_its_formula(dtype, tolerance):
    upstream = np.random.default_rng(1).normal(size=SHAPE)
    upstream[0, 0] = 0.0  # there the slope is 1 / sqrt(epsilon)
    ours = with_gradients(lambda *a: layer_norm(*a, EPSILON), tensors(dtype), upstream)
    exact = with_gradients(formula, tensors("float64"), upstream)
    for one, other in zip(ours, exact, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype, tolerance", [("bfloat16", 2e-2), ("float16", 3e-3)])
def test_narrow_inputs_are_computed_in_float32(dtype, tolerance):
    x, gamma, beta = tensors("float32")
    upstream = np.random.default_rng(1).normal(size=SHAPE)
    arguments = [tf.cast(x, dtype), gamma, beta]
    ours = with_gradients(lambda *a: layer_norm(*a, EPSILON), arguments, upstream)
    rounded = [tf.cast(arguments[0], tf.float64), *tensors("float64")[1:]]
    exact = with_gradients(formula, rounded, upstream)
    assert layer_norm(*arguments, EPSILON).dtype == dtype
    for one, other in zip(ours, exact, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * abs(other).max())


def test_backward_reads_one_tensor_of_the_forward_pass():
    @tf.function(autograph=False)
    def run(x, gamma, beta, upstream):
        y = layer_norm(x, gamma, beta, EPSILON)
        graph = tf.compat.v1.get_default_graph()
        inside = {op.name for op in graph.get_operations()}
        tf.gradients(y, [x, gamma, beta], upstream)
        # Zeros are the gradients of what a custom gradient passes through; nobody reads them.
        after = [op for op in graph.get_operations()[len(inside) :] if op.type != "ZerosLike"]
        read = {i.name: i for op in after for i in op.inputs if i.op.name in inside}
        large = [n for n, t in read.items() if t.shape == SHAPE and n != upstream.name]
        readers = {n: [op.type for op in after for i in op.inputs if i.name == n] for n in large}
        assert len(large) == 1, readers
        return y

    run.get_concrete_function(
        *(tf.TensorSpec(v.shape) for v in (*tensors("float32"), np.ones(SHAPE)))
    )
