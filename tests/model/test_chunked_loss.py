"""The chunked head and loss equal whole logits: sums, gradients, in every awkward case."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tfbig.loss import head_loss
from tfbig.loss_config import LossConfig
from tfbig.model.chunked_loss import chunked_token_loss
from tfbig.token_chunks import chunk_tokens

TOKENS, WIDTH, VOCABULARY = 14, 6, 23
PLAIN = LossConfig()
TERMS = {
    "z": LossConfig(z_loss=0.01),
    "smooth": LossConfig(label_smoothing=0.1),
    "both": LossConfig(z_loss=0.01, label_smoothing=0.1),
}


def inputs(dtype: str, is_table: bool, has_bias: bool, size: float = 1.0) -> list[tf.Tensor]:
    random = np.random.default_rng(0)
    shape = (VOCABULARY, WIDTH) if is_table else (WIDTH, VOCABULARY)
    parts = [size * random.normal(size=(TOKENS, WIDTH)), random.normal(size=shape)]
    parts += [random.normal(size=VOCABULARY)] if has_bias else []
    return [tf.constant(part, dtype) for part in parts]


def labels_and_mask() -> tuple[tf.Tensor, tf.Tensor]:
    random = np.random.default_rng(1)
    mask = random.integers(0, 2, TOKENS)
    mask[4:8] = 0  # a chunk without a valid token
    return tf.constant(random.integers(0, VOCABULARY, TOKENS), tf.int32), tf.constant(mask)


def whole(hidden, weight, bias, labels, mask, is_table, terms=PLAIN):
    """The same from whole logits, in the inputs' own dtype, by the definitions."""
    logits = tf.matmul(hidden, weight, transpose_b=is_table)
    logits = logits if bias is None else logits + bias
    log_sum = tf.reduce_logsumexp(logits, -1)
    log_likelihood = logits - log_sum[:, tf.newaxis]
    target = tf.one_hot(labels, VOCABULARY, dtype=logits.dtype)
    loss = -tf.reduce_sum(target * log_likelihood, -1)
    smooth = (1 - terms.label_smoothing) * target + terms.label_smoothing / VOCABULARY
    minimised = -tf.reduce_sum(smooth * log_likelihood, -1) + terms.z_loss * log_sum**2
    summed = tf.reduce_sum(minimised * tf.cast(mask, loss.dtype))
    return summed, loss, tf.argmax(logits, -1, tf.int32)


def both(dtype, is_table, has_bias, step, size=1.0, jit_compile=False, terms=PLAIN):
    tensors, (labels, mask) = inputs(dtype, is_table, has_bias, size), labels_and_mask()

    def chunked(hidden, weight, bias, labels, mask, is_table, terms):
        return chunked_token_loss(hidden, weight, bias, labels, mask, is_table, True, step, terms)

    results = []
    for function in (chunked, whole):

        def run(tensors, function=function):
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                bias = tensors[2] if has_bias else None
                found = function(*tensors[:2], bias, labels, mask, is_table, terms)
            scale = tf.constant(3.0, found[0].dtype)
            return [*found, *tape.gradient(found[0], tensors, output_gradients=scale)]

        run = tf.function(run, autograph=False, jit_compile=jit_compile)
        results.append([np.array(tf.cast(x, tf.float64)) for x in run(tensors)])
    return results


@pytest.mark.parametrize("step", [1, 4, 14, 100])
@pytest.mark.parametrize("is_table,has_bias", itertools.product([True, False], repeat=2))
def test_equals_whole_logits(is_table, has_bias, step):
    for dtype, tolerance in (("float64", 1e-10), ("float32", 1e-5)):
        for one, other in zip(*both(dtype, is_table, has_bias, step), strict=True):
            np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
@pytest.mark.parametrize("is_table,has_bias", [(True, False), (False, True)])
def test_terms_equal_their_definitions(is_table, has_bias, terms):
    for dtype, tolerance in (("float64", 1e-10), ("float32", 1e-5)):
        results = both(dtype, is_table, has_bias, 4, terms=terms)
        for one, other in zip(*results, strict=True):
            np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
    plain = both("float64", is_table, has_bias, 4)[0]
    assert results[0][0] != pytest.approx(plain[0], rel=1e-3), "terms are in what is minimised"
    np.testing.assert_allclose(results[0][1], plain[1], rtol=1e-5)  # but not in what is reported


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_whole_logits_have_the_same_terms(terms):
    hidden, weight = inputs("float64", True, False)
    labels, mask = labels_and_mask()
    logits = tf.matmul(hidden, weight, transpose_b=True)[tf.newaxis]
    summed = head_loss(logits, labels[tf.newaxis], mask[tf.newaxis], terms)[0]
    expected = whole(hidden, weight, None, labels, mask, True, terms)[0]
    assert float(summed) == pytest.approx(float(expected), rel=1e-10)


def test_extreme_logits():
    for one, other in zip(*both("float64", True, True, 4, size=1e4), strict=True):
        assert np.all(np.isfinite(one))
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-7)


def test_compiled():
    results = both("float32", False, True, 4, jit_compile=True, terms=TERMS["both"])
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_bfloat16_is_close_to_float32():
    rounded, exact = (both(dtype, True, False, 4)[0] for dtype in ("bfloat16", "float32"))
    for index in (0, 1, 3, 4):  # predictions may differ where bfloat16 makes logits equal
        error = np.linalg.norm(rounded[index] - exact[index])
        assert 0 < error < 2e-2 * np.linalg.norm(exact[index])


def test_no_tensor_holds_whole_logits():
    hidden, weight = inputs("float32", True, False)
    labels, mask = labels_and_mask()

    @tf.function(autograph=False)
    def run(hidden, weight):
        with tf.GradientTape() as tape:
            tape.watch([hidden, weight])
            loss, *_ = chunked_token_loss(hidden, weight, None, labels, mask, True, True, 2)
        return tape.gradient(loss, [hidden, weight])

    graph = run.get_concrete_function(hidden, weight).graph
    sizes = [out.shape.num_elements() or 0 for op in graph.get_operations() for out in op.outputs]
    assert max(sizes) == VOCABULARY * WIDTH
    assert VOCABULARY * WIDTH < TOKENS * VOCABULARY


def test_a_head_without_gradients_says_so():
    hidden, weight = inputs("float32", True, False)
    labels, mask = labels_and_mask()
    with tf.GradientTape() as tape:
        tape.watch(hidden)
        loss, *_ = chunked_token_loss(hidden, weight, None, labels, mask, True, False)
    with pytest.raises(AssertionError, match="nobody would ask"):
        tape.gradient(loss, hidden)


def test_sums_by_row_are_those_of_whole_logits():
    hidden, weight = inputs("float32", True, False)
    labels, mask = labels_and_mask()
    summed, *_ = chunked_token_loss(hidden, weight, None, labels, mask, True, True, 4)
    logits = tf.reshape(tf.matmul(hidden, weight, transpose_b=True), [2, 7, VOCABULARY])
    wanted = head_loss(logits, tf.reshape(labels, [2, 7]), tf.reshape(mask, [2, 7]))[0]
    assert float(summed) == pytest.approx(float(wanted), rel=1e-6)


def test_chunks_of_large_vocabularies_stay_worth_their_additions():
    assert [chunk_tokens(v) for v in (1 << 13, 1 << 16, 1 << 20)] == [4096, 1024, 1024]
