"""What every whole-model strategy does in a step beside summing: float16, averages, norms, XLA."""

import itertools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.distributed.parity_worker import local_batch, make_config
from tfbig.errors import UserError
from tfbig.loss_scale import LARGEST
from trainers import check_strategy
from trainers.replica import ReplicaTrainer
from trainers.single import SingleTrainer
from trainers.validate import gradient_reduction

DROPOUT = {"dropout": 0.2, "attention_dropout": 0.1, "embedding_dropout": 0.1}
SGD = {"optimizer": "sgd", "learning_rate": 0.1, "clip_norm": 0.0, "strategy": "single"}


def make(**fields: Any) -> SingleTrainer:
    config = make_config({"fields": {**SGD, **fields}, "model": {"num_layers": 2, **DROPOUT}})
    trainer = SingleTrainer(config)
    trainer.build(num_sources=3)
    return trainer


def steps(trainer: ReplicaTrainer, count: int, first: int = 0, **arguments: float) -> list:
    max_loss = arguments.get("max_loss", 0.0)
    return [
        trainer.train_step(local_batch(trainer, step), step, 0.1, max_loss, 0)
        for step in range(first, first + count)
    ]


def state(trainer: ReplicaTrainer) -> dict[str, np.ndarray]:
    return {part.path: np.array(part.array) for part in trainer.state_slices()}


def losses(results: list) -> list[float]:
    return [float(result.loss_sum / result.num_tokens) for result in results]


class Reader:
    """A checkpoint in memory."""

    def __init__(self, values: dict[str, np.ndarray]) -> None:
        self.values = values

    def has(self, path: str) -> bool:
        return path in self.values

    def read(self, path: str, start=None, shape=None) -> np.ndarray:
        return self.values[path]


@pytest.fixture(scope="module")
def plain() -> SingleTrainer:
    return make()


@pytest.fixture(scope="module")
def plain_results(plain) -> list:
    return steps(plain, 3)


def test_float16_is_close_to_float32(plain, plain_results):
    trainer = make(precision="float16")
    results = steps(trainer, 3)
    assert {float(result.loss_scale) for result in results} == {65536.0}
    np.testing.assert_allclose(losses(results), losses(plain_results), rtol=1e-4)
    for result, exact in zip(results, plain_results, strict=True):
        assert float(result.grad_norm) == pytest.approx(float(exact.grad_norm), rel=2e-3)
    assert losses(results) != losses(plain_results)
    path = "transformer_blocks/0/att/qkv/kernel"
    np.testing.assert_allclose(state(trainer)[path], state(plain)[path], atol=1e-4)


def test_the_loss_scale_halves_on_overflow_and_doubles_after_a_while():
    fields = {"precision": "float16", "optimizer": "adamw", "loss_scale_growth_steps": 2}
    trainer = make(**fields, initial_loss_scale=LARGEST)
    before = state(trainer)
    (result,) = steps(trainer, 1)
    assert not bool(result.applied) and float(result.loss_scale) == LARGEST
    after = state(trainer)
    for path in before:
        if path == "optimizer/loss_scale":
            assert after[path] == LARGEST / 2
        else:
            np.testing.assert_array_equal(before[path], after[path], err_msg=path)
    results = steps(trainer, 14, first=1)
    scales = [float(result.loss_scale) for result in results]
    applied = [bool(result.applied) for result in results]
    assert any(applied), scales
    count = 0
    for now, following, good in zip(scales[:-1], scales[1:], applied[:-1], strict=True):
        count = count + 1 if good else 0
        assert following == now * (0.5 if not good else 2.0 if count == 2 else 1.0)
        count = 0 if count == 2 else count
    assert 2.0 in {b / a for a, b in itertools.pairwise(scales)}
    saved = state(trainer)
    assert saved["optimizer/iterations"] == sum(applied)
    # A new trainer that reads this state goes on exactly so.
    resumed = make(**fields)
    assert resumed.load_state(Reader(saved)) == []
    going_on, again = steps(trainer, 3, first=15), steps(resumed, 3, first=15)
    np.testing.assert_allclose(losses(again), losses(going_on), rtol=1e-6)
    assert [float(r.loss_scale) for r in again] == [float(r.loss_scale) for r in going_on]


def test_a_skip_for_the_loss_is_no_overflow():
    trainer = make(precision="float16", loss_scale_growth_steps=1000)
    (result,) = steps(trainer, 1, max_loss=0.5)
    assert not bool(result.applied)
    assert state(trainer)["optimizer/loss_scale"] == 65536.0
    assert state(trainer)["optimizer/loss_scale_steps"] == 1


def test_the_average_of_weights_equals_its_recursion():
    trainer = make(ema_decay=0.75)
    weights = state(trainer)
    expected = {p: v for p, v in weights.items() if not p.startswith(("ema/", "optimizer/"))}
    for path, value in expected.items():
        np.testing.assert_array_equal(weights[f"ema/{path}"], value)
    for step in range(3):
        steps(trainer, 1, first=step)
        now = state(trainer)
        expected = {p: 0.75 * v + 0.25 * now[p] for p, v in expected.items()}
    steps(trainer, 1, first=3, max_loss=0.1)  # skipped: leaves the average alone
    now = state(trainer)
    for path, value in expected.items():
        np.testing.assert_allclose(now[f"ema/{path}"], value, rtol=1e-5, atol=1e-7)
    # Evaluating the average is evaluating a model that has it as weights.
    batch = local_batch(trainer, 9)
    averaged = trainer.evaluate_step(batch, "ema")[0]
    other = make()
    other.load_state(Reader({p: now[f"ema/{p}"] for p in expected}), weights_only=True)
    np.testing.assert_allclose(averaged, other.evaluate_step(batch)[0], rtol=1e-6)
    assert not np.allclose(averaged, trainer.evaluate_step(batch)[0], rtol=1e-5)
    # Weights from elsewhere start a new average.
    trainer.load_state(Reader({p: v + 1 for p, v in expected.items()}), weights_only=True)
    path = "final_norm/gamma"
    np.testing.assert_array_equal(state(trainer)[f"ema/{path}"], state(trainer)[path])


def test_norms_by_layer_are_those_of_the_gradients(plain_results):
    trainer = make(layer_grad_norms=True)

    @tf.function(autograph=False)
    def gradients_of(batch):
        from trainers.clock import Clock

        return trainer._gradients(batch, tf.constant(0, tf.int64), Clock())[0]

    gradients = gradients_of(local_batch(trainer, 0))
    (result,) = steps(trainer, 1)
    norms = result.layer_grad_norms.numpy()
    parts = ["embedding_layer/", "transformer_blocks/0/", "transformer_blocks/1/", "final_norm/"]
    for norm, prefix in zip(norms, parts, strict=True):
        own = [g.numpy().ravel() for path, g in gradients.items() if path.startswith(prefix)]
        expected = np.linalg.norm(np.concatenate(own)) / float(result.num_tokens)
        assert norm == pytest.approx(expected, rel=1e-5)
    assert float(result.grad_norm) == pytest.approx(float(np.sqrt(np.sum(norms**2))), rel=1e-5)
    assert plain_results[0].layer_grad_norms.shape == (0,)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_compiled_pass_gives_the_same(plain, plain_results, microbatches):
    trainer = make(jit_compile=True, microbatches=microbatches)
    np.testing.assert_allclose(losses(steps(trainer, 3)), losses(plain_results), rtol=1e-5)
    compiled, interpreted = state(trainer), state(plain)
    for path, value in interpreted.items():
        np.testing.assert_allclose(compiled[path], value, rtol=1e-4, atol=1e-5, err_msg=path)
    graph = trainer._train.get_concrete_function(
        local_batch(trainer, 0),
        *(tf.TensorSpec([], kind) for kind in (tf.int64, tf.float32, tf.float32, tf.int32)),
    ).graph.as_graph_def()
    assert any(f.attr["_XlaMustCompile"].b for f in graph.library.function)


def test_ids_beyond_the_true_vocabulary_are_never_written():
    config = make_config({"fields": SGD, "model": {"num_layers": 1, **DROPOUT}})
    true = config.model.vocab_size - 4  # the rest pads the embedding
    trainers = [SingleTrainer(config) for _ in range(2)]
    trainers[0].build(False, vocab_size=true)
    trainers[1].build(False)
    tokens = np.random.default_rng(5).integers(0, true, (2, 4), np.int32)
    logits, whole = (
        one.decode_step(
            tokens,
            np.array([4, 2], np.int32),
            np.arange(2, dtype=np.int32),
            np.zeros(2, bool),
            one.new_cache(2, 8),
        )[0]
        for one in trainers
    )
    assert np.isneginf(logits[:, true:]).all() and np.isfinite(whole).all()
    np.testing.assert_allclose(logits[:, :true], whole[:, :true], rtol=1e-6)


def test_what_cannot_be_compiled_is_refused():
    def parallel(**fields):
        return make_config({"fields": {"strategy": "horovod", **fields}}).parallel

    assert gradient_reduction(parallel(jit_compile=True)) == "buckets"
    tape = {"strategy": "horovod", "gradient_reduction": "tape", "jit_compile": True}
    with pytest.raises(UserError, match="inside a compiled function"):
        check_strategy(make_config({"fields": tape}))


def test_the_tape_is_the_default_where_it_can_serve_and_refused_elsewhere():
    def reduction(**fields):
        return gradient_reduction(
            make_config({"fields": {"strategy": "horovod", **fields}}).parallel
        )

    assert reduction() == "tape" and reduction(microbatches=2) == "buckets"
    assert reduction(gradient_reduction="buckets") == "buckets"
    tape = {"strategy": "horovod", "gradient_reduction": "tape"}
    check_strategy(make_config({"fields": tape}))
    with pytest.raises(UserError, match="--microbatches=2 makes 2 of them a step: use buckets"):
        check_strategy(make_config({"fields": tape | {"microbatches": 2}}))


def test_tensor_float_32_is_a_switch():
    for wanted in (False, True):
        make(tf32=wanted)
        assert tf.config.experimental.tensor_float_32_execution_enabled() is wanted
