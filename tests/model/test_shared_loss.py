"""The head of a shared vocabulary equals whole logits: parts, chunks, padding, terms, dtypes."""

import numpy as np
import pytest
import tensorflow as tf

from tests.model.test_chunked_loss import (
    PLAIN,
    TERMS,
    TOKENS,
    VOCABULARY,
    WIDTH,
    inputs,
    labels_and_mask,
    whole,
)
from tfbig.model.shared_loss import SharedHead
from tfbig.model.tensor_split import TensorSplit


class Part(TensorSplit):
    """One of several parts, which meet in a list: a round to tell, and a round to be told."""

    def __init__(self, size: int, index: int, told: dict[int, tf.Tensor]) -> None:
        self.size, self.index, self._told = size, index, told

    def gather(self, x, name):
        self._told[self.index] = x
        return tf.stack([self._told.get(index, x) for index in range(self.size)])


def own(array: tf.Tensor, part: Part, axis: int) -> tf.Tensor:
    """Returns the part's slice of the vocabulary, and zeros for padding."""
    start, size = part.part(VOCABULARY)
    count = max(0, min(size, VOCABULARY - start))
    taken = tf.gather(array, tf.range(start, start + count), axis=axis)
    padding = [[0, 0]] * array.shape.rank
    padding[axis] = [0, size - count]
    return tf.pad(taken, padding)


def joined(tensors, is_table, num_parts, step, terms, scale):
    """Returns sum, losses, predictions and gradients of all parts together."""
    labels, mask = labels_and_mask()
    axis, told = 0 if is_table else 1, {}
    for _ in range(2):
        results = []
        for index in range(num_parts):
            part = Part(num_parts, index, told)
            shared = [tensors[0], own(tensors[1], part, axis)]
            shared += [own(bias, part, 0) for bias in tensors[2:]]
            head = SharedHead(is_table, part, VOCABULARY, terms, step)
            with tf.GradientTape() as tape:
                tape.watch(shared)
                bias = shared[2] if len(shared) > 2 else None
                found = head.loss(*shared[:2], bias, labels, mask)
            upstream = tf.constant(scale, found[0].dtype)
            results.append([*found, *tape.gradient(found[0], shared, output_gradients=upstream)])
    for other in results[1:]:
        for one, equal in zip(results[0][:3], other[:3], strict=True):
            np.testing.assert_array_equal(one, equal)
    hidden = sum(np.array(tf.cast(result[3], tf.float64)) for result in results)
    shared = [np.concatenate([r[4] for r in results], axis).take(range(VOCABULARY), axis)]
    shared += [np.concatenate([r[5] for r in results])[:VOCABULARY]] if len(tensors) > 2 else []
    return [np.array(x) for x in results[0][:3]] + [hidden, *shared]


def expected(tensors, is_table, terms, scale):
    labels, mask = labels_and_mask()
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        bias = tensors[2] if len(tensors) > 2 else None
        found = whole(*tensors[:2], bias, labels, mask, is_table, terms)
    gradients = tape.gradient(found[0], tensors)
    return [np.array(x) for x in found] + [scale * np.array(g) for g in gradients]


@pytest.mark.parametrize("num_parts,step", [(1, 4), (1, 100), (2, 1), (2, 100), (16, 5)])
@pytest.mark.parametrize("is_table,has_bias", [(True, False), (False, True)])
def test_parts_together_equal_whole_logits(is_table, has_bias, num_parts, step):
    for dtype, tolerance in (("float64", 1e-10), ("float32", 1e-5)):
        tensors = inputs(dtype, is_table, has_bias)
        found = joined(tensors, is_table, num_parts, step, PLAIN, 3.0)
        for one, other in zip(found, expected(tensors, is_table, PLAIN, 3.0), strict=True):
            np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
@pytest.mark.parametrize("num_parts,step", [(1, 4), (3, 100)])
def test_terms_equal_their_definitions(terms, num_parts, step):
    tensors = inputs("float64", True, False)
    found = joined(tensors, True, num_parts, step, terms, 3.0)
    for one, other in zip(found, expected(tensors, True, terms, 3.0), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_extreme_logits(sign):
    tensors = inputs("float64", True, False, sign * 1e4)
    found = joined(tensors, True, 2, 4, PLAIN, 1.0)
    for one, other in zip(found, expected(tensors, True, PLAIN, 1.0), strict=True):
        assert np.all(np.isfinite(one))
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-7)


def test_a_small_loss_of_large_logits_is_exact_in_float32():
    """Where all logits are near 1000, losses must not be rounded as logits are."""
    tensors = inputs("float32", False, True)
    tensors[2] += 1000.0
    losses = joined(tensors, False, 2, 4, PLAIN, 1.0)[1]
    tensors = [tf.cast(x, tf.float64) for x in tensors]
    wanted = expected(tensors, False, PLAIN, 1.0)[1]
    np.testing.assert_allclose(losses, wanted, atol=5e-4)


def test_float16s_loss_scale_is_in_gradients_before_they_are_rounded():
    """Without it the gradient of a well predicted token, here e^-18, would be rounded to 0."""
    hidden, table = tf.ones([1, 1], tf.float16), tf.constant([[0.0], [18.0]], tf.float16)
    head = SharedHead(True, TensorSplit(), 2)
    found = {}
    for scale in (1.0, 4096.0):
        with tf.GradientTape() as tape:
            tape.watch(table)
            loss, *_ = head.loss(hidden, table, None, tf.constant([1]), tf.ones([1]))
        gradient = tape.gradient(loss, table, output_gradients=tf.constant(scale))
        found[scale] = float(gradient[0, 0])
    assert found[1.0] == 0.0
    assert found[4096.0] == pytest.approx(4096 * np.exp(-18.0), rel=1e-2)


def test_no_tensor_holds_whole_logits_and_little_is_kept():
    hidden, weight = inputs("float32", True, False)
    labels, mask = labels_and_mask()
    head = SharedHead(True, TensorSplit(), VOCABULARY, num_chunk_tokens=2)

    @tf.function(autograph=False)
    def run(hidden, weight):
        with tf.GradientTape() as tape:
            tape.watch([hidden, weight])
            loss, *_ = head.loss(hidden, weight, None, labels, mask)
        return tape.gradient(loss, [hidden, weight])

    graph = run.get_concrete_function(hidden, weight).graph
    sizes = [out.shape.num_elements() or 0 for op in graph.get_operations() for out in op.outputs]
    assert max(sizes) == VOCABULARY * WIDTH < TOKENS * VOCABULARY
