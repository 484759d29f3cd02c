"""Blockwise attention equals the plain form: outputs, gradients, masks, in every awkward case."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tests.distributed.parity_worker import global_batch, local_batch, make_config
from tfbig.model.attention import causal_attention
from tfbig.model.attention_form import FORMS, AttentionForm
from tfbig.model.blockwise_attention import BlockwiseAttention, block_sizes
from tfbig.model.dropout import sample_keys
from tfbig.model.gpt import GPT
from trainers.pipeline_stage import Chunk
from trainers.single import SingleTrainer

RATE, FIRST_HEAD = 0.3, 2
# rows, positions, (queries, keys) of a block
CASES = [
    (3, 16, (4, 4)),
    (1, 12, (4, 8)),
    (2, 13, (4, 8)),  # no multiple of either block
    (2, 13, (8, 4)),  # blocks of keys that end inside a block of queries
    (1, 1, (4, 4)),
    (2, 5, (16, 16)),  # one block
]


def inputs(rows: int, length: int, dtype: str, size: float = 1.0) -> list[tf.Tensor]:
    random = np.random.default_rng(length)
    parts = random.normal(size=(4, rows, length, 3, 8))
    parts[:2] *= size  # queries and keys
    return [tf.constant(part, dtype) for part in parts]


def documents(rows: int, length: int) -> tf.Tensor:
    """Documents of odd lengths: whole blocks of keys are invisible to later rows."""
    return tf.constant([[(t + row) // 3 for t in range(length)] for row in range(rows)], tf.int32)


def with_gradients(attend, query, key, value, upstream, jit_compile: bool = False):
    def run(query, key, value):
        with tf.GradientTape() as tape:
            tape.watch([query, key, value])
            output = attend(query, key, value)
        return [output, *tape.gradient(output, [query, key, value], output_gradients=upstream)]

    run = tf.function(run, autograph=False, jit_compile=jit_compile)
    return [part.numpy().astype(np.float64) for part in run(query, key, value)]


def error(case, dtype, has_documents, has_dropout, size=1.0, jit_compile=False) -> float:
    """The largest difference of output and gradients, beside the plain form's largest number."""
    rows, length, sizes = case
    ids = documents(rows, length) if has_documents else None
    keys = None
    if has_dropout:
        keys = sample_keys(0, tf.constant(1), 0, 0, tf.range(rows, dtype=tf.int64))
    tensors = inputs(rows, length, dtype, size)
    blockwise = BlockwiseAttention(RATE, FIRST_HEAD, sizes)
    found = with_gradients(lambda *x: blockwise(*x, ids, keys), *tensors, jit_compile=jit_compile)
    wanted = with_gradients(lambda *x: causal_attention(*x, ids, keys, RATE, FIRST_HEAD), *tensors)
    assert all(np.all(np.isfinite(one)) for one in found)
    return max(
        np.abs(one - other).max() / max(1, size, np.abs(other).max())
        for one, other in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("has_documents,has_dropout", itertools.product([False, True], repeat=2))
def test_equals_the_plain_form(case, has_documents, has_dropout):
    assert error(case, "float64", has_documents, has_dropout) < 1e-10
    if has_documents and has_dropout:
        assert error(case, "float32", True, True) < 1e-5


@pytest.mark.parametrize("size", [1e-3, 30.0, 1e4])
def test_extreme_scores(size):
    assert error(CASES[2], "float64", True, True, size) < 1e-10
    # A float32 score of 1e3 is itself known to 1e-4, and a softmax's weights no better.
    assert error(CASES[2], "float32", False, False, size) < (1e-3 if size == 30 else 1e-5)


@pytest.mark.parametrize("dtype,tolerance", [("bfloat16", 4e-2), ("float16", 4e-3)])
def test_half_precision(dtype, tolerance):
    assert 0 < error(CASES[2], dtype, True, True) < tolerance


def test_large_values_stay_in_the_range_of_float16():
    query, key, value, _ = inputs(1, 16, "float16")
    blockwise = BlockwiseAttention(sizes=(8, 16))
    output = blockwise(query * 0, key, value * 0 + 30000.0)
    np.testing.assert_allclose(output, np.full(output.shape, 30000.0), rtol=2e-3)


def test_compiled():
    assert error(CASES[2], "float32", True, True, jit_compile=True) < 1e-5
    assert error(CASES[3], "float32", False, False, jit_compile=True) < 1e-5


def test_heads_of_a_part_drop_what_the_whole_layer_drops():
    tensors = inputs(2, 13, "float32")[:3]
    keys = sample_keys(0, tf.constant(1), 0, 0, tf.range(2, dtype=tf.int64))
    whole = BlockwiseAttention(RATE, 0, (4, 8))(*tensors, None, keys)
    part = BlockwiseAttention(RATE, 1, (8, 4))(*(x[:, :, 1:] for x in tensors), None, keys)
    np.testing.assert_allclose(part, whole[:, :, 1:], atol=1e-6)
    other = BlockwiseAttention(RATE, 0, (8, 4))(*(x[:, :, 1:] for x in tensors), None, keys)
    assert np.abs(other - whole[:, :, 1:]).max() > 0.1


def test_no_tensor_is_as_large_as_all_scores():
    """The passes' graphs hold blocks of scores; about half of the blocks are never made."""
    length, sizes = 64, (8, 8)
    blockwise = BlockwiseAttention(sizes=sizes)
    tensors = inputs(1, length, "float32")
    spec = [tf.TensorSpec([1, 3, length, 8])] * 3
    forward = blockwise._forward.get_concrete_function(*spec, None, None).graph
    row = tf.TensorSpec([1, 3, length, 1])
    backward = blockwise._backward.get_concrete_function(*spec, None, None, spec[0], row, spec[0])
    for graph in (forward, backward.graph):
        sizes_made = [
            out.shape.num_elements() for op in graph.get_operations() for out in op.outputs
        ]
        assert max(size for size in sizes_made if size) <= max(3 * 8 * 8, 3 * length * 8)
    products = [op for op in forward.get_operations() if op.type == "BatchMatMulV2"]
    assert len(products) == 2 * sum(range(1, length // 8 + 1))
    assert blockwise(*tensors[:3]).shape == (1, length, 3, 8)


def test_blocks_grow_with_very_long_samples():
    for length in (1, 200, 1024, 5000, 100_000):
        queries, keys = block_sizes(length)
        assert length / queries <= 65 and queries <= keys


@pytest.mark.parametrize("form", FORMS[1:])
@pytest.mark.parametrize("recomputes", [False, True])
def test_every_form_equals_the_plain_one(form, recomputes):
    tensors = inputs(2, 13, "float32")
    keys = sample_keys(0, tf.constant(1), 0, 0, tf.range(2, dtype=tf.int64))
    rest = (documents(2, 13), keys)
    attend = AttentionForm(form, RATE, FIRST_HEAD, recomputes)
    found = with_gradients(lambda *x: attend(*x, *rest), *tensors)
    wanted = with_gradients(lambda *x: causal_attention(*x, *rest, RATE, FIRST_HEAD), *tensors)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("form,is_compiled", [("plain", False), ("plain_xla", True)])
def test_the_forms_named_for_xla_are_compiled_by_it(form, is_compiled):
    attend = AttentionForm(form)
    graph = tf.function(attend).get_concrete_function(*inputs(1, 4, "float32")[:3]).graph
    compiled = [op.name for op in graph.get_operations() if "_XlaMustCompile" in op.node_def.attr]
    assert bool(compiled) == is_compiled


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_model_trains_alike_with_every_form(jit_compile):
    results = []
    for attention in FORMS[:2] if jit_compile else FORMS:  # "_xla" is compiled either way
        model = {"num_layers": 2, "attention_dropout": 0.2}
        fields = {"strategy": "single", "attention": attention, "jit_compile": jit_compile}
        trainer = SingleTrainer(make_config({"fields": fields, "model": model}))
        trainer.build(num_sources=3)
        steps = [trainer.train_step(local_batch(trainer, i), i, 0.01, 0.0, 0) for i in range(3)]
        losses = [float(step.loss_sum / step.num_tokens) for step in steps]
        results.append((losses, [float(step.grad_norm) for step in steps]))
        form = trainer.model.transformer_blocks[1].att.form
        assert form.is_blockwise(16) == attention.startswith("blockwise")
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], rtol=1e-5)


def stage_gradients(form: str, mode: str) -> list[np.ndarray]:
    """Gradients of the passes that a pipeline stage cuts from one graph."""
    model = {"num_layers": 1, "attention_dropout": 0.2}
    config = make_config({"fields": {"microbatches": 2}, "model": model})
    options = {"attention": form, "activation_checkpointing": mode, "chunked_head": False}
    chunk = Chunk(GPT.from_config(config.model, **options))
    chunk.begin()
    batch = {name: tf.constant(value) for name, value in global_batch(0).items()}
    for index in range(2):
        chunk.forward(None, batch, index, 2, tf.constant(1, tf.int64))
    for index in range(2):
        chunk.backward(index, None)
    chunk.end()
    return [total.numpy() for total in chunk.take_totals().values()]


@pytest.mark.parametrize("mode", ["none", "attention"])
def test_a_stages_passes_train_alike_with_forms_that_xla_compiles(mode):
    wanted = stage_gradients("plain", mode)
    largest = max(np.linalg.norm(one) for one in wanted)
    for form in ("plain_xla", "blockwise_xla"):
        for found, one in zip(stage_gradients(form, mode), wanted, strict=True):
            assert np.linalg.norm(found - one) < 1e-5 * max(np.linalg.norm(one), 1e-3 * largest)


def test_auto_takes_the_faster_form():
    auto, forced = (AttentionForm(choice) for choice in ("auto", "blockwise"))
    assert [auto.is_blockwise(n) for n in (None, 256, 1024)] == [False, False, True]
    assert forced.is_blockwise(1)
