"""The model against its equations, its counts, and what a causal model must keep."""

import dataclasses
import math

import numpy as np
import pytest
import tensorflow as tf

from tests.model import reference_gpt
from tfbig import presets
from tfbig.config import ModelConfig, count_parameters
from tfbig.loss import head_loss
from tfbig.loss_config import LossConfig
from tfbig.model.context import make_context
from tfbig.model.gpt import GPT, init_train_settings
from tfbig.variables import variable_specs

TINY = ModelConfig(vocab_size=23, max_length=9, embed_dim=12, num_layers=2, num_heads=3)
BLOG = dataclasses.replace(
    presets.blog().model, vocab_size=23, max_length=9, embed_dim=6, head_dim=6, feed_forward_dim=10
)
NEOX = dataclasses.replace(
    TINY,
    embed_dim=24,
    position_embedding="rotary",
    rotary_fraction=0.5,
    rotary_base=50.0,
    parallel_residual=True,
    activation="gelu",
    tied_head=False,
)
SEQUENTIAL_NEOX = dataclasses.replace(NEOX, parallel_residual=False)
MODELS = {"gpt2": TINY, "blog": BLOG, "neox": NEOX, "sequential_neox": SEQUENTIAL_NEOX}
SMALL_PRESETS = [n for n in presets.names() if count_parameters(presets.preset(n).model) < 500e6]


def make_batch(config: ModelConfig, rows: int = 3, seed: int = 0) -> dict[str, tf.Tensor]:
    random = np.random.default_rng(seed)
    length = config.max_length
    return {
        "tokens": tf.constant(random.integers(0, config.vocab_size, (rows, length + 1), np.int32)),
        "sample_index": tf.range(rows, dtype=tf.int64),
        "loss_mask": tf.constant(random.integers(0, 2, (rows, length)).astype(np.uint8)),
    }


def loss_sum(model: GPT, batch, training: bool = False, step: int = 0) -> tf.Tensor:
    context = make_context(batch, tf.constant(step), training)
    hidden = model.hidden_state(batch["tokens"][:, :-1], context)
    return model.head_loss(hidden, batch["tokens"][:, 1:], batch["loss_mask"])[0]


def randomise(model: GPT, seed: int = 1) -> reference_gpt.Weights:
    """Gives every variable, biases and norms too, a value that matters."""
    random = np.random.default_rng(seed)
    weights = {}
    for path, variable in model.canonical_variables().items():
        value = random.normal(0.0, 0.4, variable.shape) + path.endswith("gamma")
        variable.assign(value)
        weights[path] = variable.numpy().astype(np.float64)
    return weights


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_equals_its_equations(config):
    model = GPT(config)
    weights = randomise(model)
    batch = make_batch(config)
    tokens = batch["tokens"][:, :-1]
    expected = reference_gpt.logits(config, weights, tokens.numpy())
    np.testing.assert_allclose(model(tokens).numpy(), expected, rtol=1e-4, atol=1e-4)
    reference = reference_gpt.loss_sum(
        config, weights, tokens.numpy(), batch["tokens"][:, 1:].numpy(), batch["loss_mask"].numpy()
    )
    assert float(loss_sum(model, batch)) == pytest.approx(reference, rel=1e-5)


@pytest.mark.parametrize("chunked_head", [True, False])
def test_terms_are_in_what_is_minimised_and_not_in_what_is_reported(chunked_head):
    terms = LossConfig(z_loss=0.1, label_smoothing=0.2)
    model = GPT(NEOX, loss=terms, chunked_head=chunked_head)
    randomise(model)
    batch = make_batch(NEOX)
    context = make_context(batch, tf.constant(0), False)
    hidden = model.hidden_state(batch["tokens"][:, :-1], context)
    labels, mask = batch["tokens"][:, 1:], batch["loss_mask"]
    trained, evaluated = (model.head_loss(hidden, labels, mask, t) for t in (True, False))
    for one, other in zip(trained[1:], evaluated[1:], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert float(evaluated[0]) == pytest.approx(float(tf.reduce_sum(evaluated[1])), rel=1e-6)
    whole = head_loss(model.logits(hidden), labels, mask, terms)[0]
    assert float(trained[0]) == pytest.approx(float(whole), rel=1e-5)
    assert float(trained[0]) != pytest.approx(float(evaluated[0]), rel=1e-2)


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_gradients_equal_finite_differences(config):
    model = GPT(config)
    weights = randomise(model)
    batch = make_batch(config, rows=2)
    tokens, labels = batch["tokens"][:, :-1].numpy(), batch["tokens"][:, 1:].numpy()
    mask = batch["loss_mask"].numpy()
    variables = model.canonical_variables()
    with tf.GradientTape() as tape:
        loss = loss_sum(model, batch)
    gradients = tape.gradient(loss, [v.value for v in variables.values()])
    random = np.random.default_rng(2)
    scale = max(float(tf.reduce_max(tf.abs(g))) for g in gradients)
    for (path, weight), gradient in zip(weights.items(), gradients, strict=True):
        direction = random.normal(size=weight.shape)
        direction /= np.linalg.norm(direction)
        step = 1e-5
        values = []
        for sign in (1, -1):
            moved = weights | {path: weight + sign * step * direction}
            values.append(reference_gpt.loss_sum(config, moved, tokens, labels, mask))
        numeric = (values[0] - values[1]) / (2 * step)
        analytic = float(np.sum(gradient.numpy() * direction))
        assert analytic == pytest.approx(numeric, rel=2e-4, abs=2e-5 * scale), path


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_no_output_depends_on_a_later_token(config):
    model = GPT(config, seed=3)
    tokens = make_batch(config)["tokens"][:, :-1].numpy()
    before = model(tokens).numpy()
    for place in range(config.max_length):
        changed = tokens.copy()
        changed[:, place] = (changed[:, place] + 1) % config.vocab_size
        after = model(changed).numpy()
        np.testing.assert_array_equal(before[:, :place], after[:, :place])
        assert not np.array_equal(before[:, place], after[:, place])


def test_documents_do_not_see_each_other():
    model = GPT(TINY, seed=3)
    batch = make_batch(TINY, rows=1)
    ids = np.array([[0, 0, 0, 0, 1, 1, 1, 1, 1, 1]], np.int32)  # 4 tokens, then another document

    def hidden(tokens):
        context = make_context({**batch, "document_ids": tf.constant(ids)}, tf.constant(0), False)
        return model.hidden_state(tokens, context).numpy()

    tokens = batch["tokens"][:, :-1].numpy()
    other = tokens.copy()
    other[:, :4] = (other[:, :4] + 5) % TINY.vocab_size
    np.testing.assert_array_equal(hidden(tokens)[:, 4:], hidden(other)[:, 4:])
    assert not np.array_equal(hidden(tokens)[:, :4], hidden(other)[:, :4])
    # The second document alone gives the same, so its positions start at 0.
    alone = np.concatenate([tokens[:, 4:], tokens[:, :4]], axis=1)
    np.testing.assert_allclose(
        hidden(tokens)[:, 4:],
        model.hidden_state(
            alone,
            make_context({**batch, "tokens": tf.zeros([1, 10], tf.int32)}, tf.constant(0), False),
        ).numpy()[:, :5],
        atol=1e-6,
    )


@pytest.mark.parametrize("name", SMALL_PRESETS)
def test_counts_equal_the_built_model(name):
    config = presets.preset(name).model
    model = GPT(config, initial_values=False)
    shapes = {path: tuple(v.shape) for path, v in model.canonical_variables().items()}
    assert shapes == {spec.path: spec.shape for spec in variable_specs(config)}
    assert model.count_params() == count_parameters(config)


@pytest.mark.parametrize("width", [64, 768])
def test_initial_loss_of_a_tied_head(width):
    config = ModelConfig(vocab_size=5000, max_length=64, embed_dim=width, num_layers=2, num_heads=4)
    batch = make_batch(config, rows=8)
    batch["loss_mask"] = tf.ones_like(batch["loss_mask"])
    mean = float(loss_sum(GPT(config, seed=5), batch)) / (8 * 64)
    assert mean == pytest.approx(math.log(5000) + width * 0.02**2 / 2, abs=0.02)


def test_initial_values_follow_seed_and_path_alone():
    whole = {k: v.numpy() for k, v in GPT(TINY, seed=7).canonical_variables().items()}
    GPT(TINY, seed=8)  # a model built in between changes nothing
    stage = GPT(TINY, (1, 2), seed=7).canonical_variables()
    assert "transformer_blocks/1/att/qkv/kernel" in stage
    assert "transformer_blocks/0/att/qkv/kernel" not in stage
    assert "embedding_layer/pos_emb/embeddings" not in stage
    assert "embedding_layer/token_emb/embeddings" in stage  # of the tied head
    for path, variable in stage.items():
        np.testing.assert_array_equal(variable.numpy(), whole[path])
    other = GPT(TINY, seed=8).canonical_variables()
    assert not np.array_equal(
        other["transformer_blocks/1/att/qkv/kernel"].numpy(),
        whole["transformer_blocks/1/att/qkv/kernel"],
    )


def test_initial_values_have_the_stated_spread():
    config = dataclasses.replace(TINY, embed_dim=192, num_heads=4, num_layers=8)
    variables = GPT(config).canonical_variables()
    spread = {path: float(np.std(v.numpy())) for path, v in variables.items()}
    block = "transformer_blocks/3"
    assert spread[f"{block}/att/qkv/kernel"] == pytest.approx(0.02, rel=0.02)
    for residual in ("att/out", "ffn/down"):
        assert spread[f"{block}/{residual}/kernel"] == pytest.approx(0.02 / 4, rel=0.02)
    assert spread[f"{block}/att/qkv/bias"] == 0


def test_bfloat16_keeps_variables_in_float32():
    model = GPT(TINY, precision="bfloat16")
    assert all(v.dtype == "float32" for v in model.canonical_variables().values())
    logits = model(make_batch(TINY)["tokens"][:, :-1])
    assert logits.dtype == tf.bfloat16
    exact = GPT(TINY)(make_batch(TINY)["tokens"][:, :-1]).numpy()
    np.testing.assert_allclose(tf.cast(logits, tf.float32).numpy(), exact, atol=0.02)


def test_embedding_gradient_is_dense_and_summed():
    model = GPT(TINY)
    batch = make_batch(TINY)
    batch["tokens"] = tf.ones_like(batch["tokens"])  # one token, many times
    table = model.canonical_variables()["embedding_layer/token_emb/embeddings"].value
    with tf.GradientTape() as tape:
        loss = loss_sum(model, batch)
    gradient = tape.gradient(loss, table)
    assert isinstance(gradient, tf.Tensor)
    assert np.all(np.abs(gradient.numpy()[1]) > 0)


def test_overfits_one_batch():
    config = dataclasses.replace(TINY, embed_dim=32, num_heads=4)
    model = GPT(config)
    batch = make_batch(config)
    batch["loss_mask"] = tf.ones_like(batch["loss_mask"])
    variables = [v.value for v in model.canonical_variables().values()]

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = loss_sum(model, batch) / tf.cast(tf.size(batch["loss_mask"]), tf.float32)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.5 * gradient)
        return loss

    losses = [float(step()) for _ in range(300)]
    assert losses[0] == pytest.approx(math.log(23), abs=0.2)
    assert losses[-1] < 0.1


def test_dropout_masks_do_not_depend_on_the_split_of_a_batch():
    config = dataclasses.replace(TINY, dropout=0.3, attention_dropout=0.2, embedding_dropout=0.1)
    model = GPT(config)
    batch = make_batch(config, rows=4)
    whole = float(loss_sum(model, batch, training=True))
    halves = [{k: v[i : i + 2] for k, v in batch.items()} for i in (0, 2)]
    split = sum(float(loss_sum(model, half, training=True)) for half in halves)
    assert split == pytest.approx(whole, rel=1e-6)
    jitted = tf.function(lambda: loss_sum(model, batch, training=True), jit_compile=True)
    assert float(jitted()) == pytest.approx(whole, rel=1e-5)
    assert abs(float(loss_sum(model, batch, training=True, step=1)) - whole) > 1e-3
    assert abs(float(loss_sum(model, batch)) - whole) > 1e-3


def test_the_originals_entry_point():
    model, optimizer, loss = init_train_settings(9, 23, 6, 2, 10, 2, 1e-3)
    tokens = make_batch(BLOG)["tokens"]
    outputs = model(tokens[:, :-1], training=True)
    assert isinstance(outputs, list)
    assert outputs[0].shape == (3, 9, 23) and outputs[1].shape == (3, 9, 6)
    assert not np.array_equal(
        model(tokens[:, :-1], training=True)[0].numpy(), outputs[0].numpy()
    ), "each call of a training model drops other elements"
    with tf.GradientTape() as tape:
        value = loss(tokens[:, 1:], model(tokens[:, :-1], training=True)[0])
    variables = [v.value for v in model.trainable_variables]
    optimizer.apply_gradients(
        zip(tape.gradient(value, variables), model.trainable_variables, strict=True)
    )
    assert model.count_params() == count_parameters(model.config)
