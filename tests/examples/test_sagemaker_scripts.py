"""SageMaker's scripts train what tfbig trains, on 1, 2 and 4 processes."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from data_pipeline.dataset import TokenData
from data_pipeline.preparation import prepare
from examples.sagemaker_scripts.train_horovod import MyModel
from tests.distributed.launch import horovodrun, run
from tfbig.config import Config, ModelConfig, PrepareConfig, replace_fields
from trainers.single import SingleTrainer

LENGTH, VOCABULARY, WIDTH, HEADS, HIDDEN, LAYERS = 16, 300, 16, 2, 32, 4
BATCH, STEPS, RATE = 8, 4, 0.01
WORKER = "tests/examples/scripts_worker.py"
WORLDS = (1, 2, 4)
ZEROS = np.zeros((1, LENGTH), np.int32)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("data")
    text = Path(__file__).read_text()
    (folder / "text.txt").write_text(text)
    prepare(
        PrepareConfig(
            data=str(folder / "data"),
            source=str(folder / "text.txt"),
            validation_fraction=0.0,
            sequence_length=LENGTH,
            vocab_size=VOCABULARY,
        )
    )
    return str(folder / "data")


@pytest.fixture(scope="module")
def printed(data, tmp_path_factory) -> dict[int, str]:
    """What each world's launch printed; "folder" is where it wrote."""
    folder = tmp_path_factory.mktemp("scripts")
    flags = [
        *(f"--data={data}", f"--maxlen={LENGTH}", f"--vocab_size={VOCABULARY}"),
        *(f"--embed_dim={WIDTH}", f"--num_heads={HEADS}", f"--feed_forward_dim={HIDDEN}"),
        *(f"--num_layers={LAYERS}", "--dropout=0", f"--learning_rate={RATE}"),
        *(f"--batch_size={BATCH}", "--print_every=1"),
    ]
    outputs = {"folder": str(folder)}
    for world in WORLDS:
        # The Horovod script makes steps // world of them.
        arguments = [WORKER, str(folder), *flags, f"--steps={STEPS * world}"]
        if world == 1:
            done = run([sys.executable, *arguments], 1200)
        else:
            done = horovodrun(world, arguments, 1500)
        assert done.returncode == 0, done.stdout
        outputs[world] = done.stdout
    return outputs


def losses(output: str, script: int) -> list[float]:
    part = output.split("the second script")[0 if script == 1 else -1]
    return [float(loss) for loss in re.findall(r"step \d+ loss (\S+)", part)][:STEPS]


def canonical(variables: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the weights of a model of Keras' layers, in their order, by our paths."""
    rest = iter(variables)
    values = {f"embedding_layer/{name}/embeddings": next(rest) for name in ("token_emb", "pos_emb")}
    for index in range(LAYERS):
        block = f"transformer_blocks/{index}"
        kernels, biases = zip(*[(next(rest), next(rest)) for _ in range(3)], strict=True)
        values[f"{block}/att/qkv/kernel"] = np.stack(kernels, axis=1)  # (D, 3, H, d)
        values[f"{block}/att/qkv/bias"] = np.stack(biases)  # (3, H, d)
        for name in ("att/out", "ffn/up", "ffn/down"):
            values[f"{block}/{name}/kernel"], values[f"{block}/{name}/bias"] = (
                next(rest),
                next(rest),
            )
        for name in ("layernorm1", "layernorm2"):
            values[f"{block}/{name}/gamma"], values[f"{block}/{name}/beta"] = next(rest), next(rest)
    values["dense/kernel"], values["dense/bias"] = next(rest), next(rest)
    assert not list(rest)
    return values


class Reader:
    def __init__(self, values: dict[str, np.ndarray]) -> None:
        self._values = values

    def has(self, path: str) -> bool:
        return path in self._values

    def read(self, path, start=None, shape=None) -> np.ndarray:
        return self._values[path]


def reference(data: str, initial: dict[str, np.ndarray], num_ranks: int, rate: float):
    """Returns the losses of rank 0's rows, as tfbig's single device trains all ranks' rows."""
    model = ModelConfig(
        vocab_size=VOCABULARY,
        max_length=LENGTH,
        embed_dim=WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        head_dim=WIDTH,
        feed_forward_dim=HIDDEN,
        norm_order="post",
        norm_epsilon=1e-6,
        final_norm=False,
        activation="relu",
        tied_head=False,
        head_bias=True,
        dropout=0.0,
    )
    fields = {
        "sequence_length": LENGTH,
        "global_batch": BATCH * num_ranks,
        "weight_decay": 0.0,
        "clip_norm": 0.0,
        "beta1": 0.9,
        "beta2": 0.999,
        "epsilon": 1e-12,  # as scripts_worker.py
    }
    trainer = SingleTrainer(replace_fields(Config(model=model), fields))
    trainer.build(num_sources=num_ranks)
    missing = trainer.load_state(Reader(initial), weights_only=True)
    assert not missing
    rows = TokenData.open(data, vocab_size=VOCABULARY)
    seen = []
    for step in range(STEPS):
        first = step * BATCH * num_ranks
        own = np.arange(BATCH)[:, np.newaxis] * num_ranks + np.arange(num_ranks)
        tokens = rows.rows_in_order("train", first + own.T.reshape(-1))["tokens"]
        batch = {
            "tokens": tf.constant(tokens, tf.int32),
            "sample_index": tf.range(len(tokens), dtype=tf.int64),
            "source_index": tf.repeat(tf.range(num_ranks), BATCH),
            "loss_mask": tf.ones([len(tokens), LENGTH], tf.uint8),
        }
        result = trainer.train_step(batch, step, rate, 0.0, 0)
        seen.append(float(result.source_loss_sum[0] / result.source_num_tokens[0]))
    return seen


@pytest.mark.distributed
@pytest.mark.parametrize("world", WORLDS)
def test_the_horovod_script_trains_as_tfbig_does(printed, data, world):
    tf.keras.utils.set_random_seed(0)
    # Without dropout as the script's: Keras' layers draw seeds where they drop.
    model = MyModel(LENGTH, VOCABULARY, WIDTH, HEADS, HIDDEN, LAYERS, rate=0.0)
    model(ZEROS)
    initial = canonical([v.numpy() for v in model.trainable_variables])
    expected = reference(data, initial, world, RATE * world)
    found = losses(printed[world], 1)
    assert len(found) == STEPS and expected[-1] < expected[0]
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.distributed
@pytest.mark.parametrize("world", WORLDS)
def test_the_smp_script_trains_as_tfbig_does(printed, data, world):
    with np.load(f"{printed['folder']}/initial.npz") as file:
        values = [file[str(index)] for index in range(len(file.files))]
    initial = canonical([value for value in values if value.dtype == np.float32])
    found = losses(printed[world], 2)
    assert len(found) == STEPS
    np.testing.assert_allclose(found, reference(data, initial, 1, RATE), rtol=1e-4)


@pytest.mark.distributed
def test_each_stage_has_its_own_variables_only(printed):
    counts = {
        world: sorted(map(int, re.findall(r"has (\d+) variables", printed[world])))
        for world in WORLDS
    }
    assert counts == {1: [68], 2: [34, 34], 4: [16, 16, 18, 18]}


@pytest.mark.distributed
def test_the_saved_model_is_whole_whatever_the_stages(printed):
    logits = {}
    for world in WORLDS:
        with np.load(f"{printed['folder']}/saved_{world}.npz") as file:
            logits[world] = file["logits"]
    assert np.std(logits[1]) > 0.1
    for world in WORLDS[1:]:
        np.testing.assert_allclose(logits[world], logits[1], rtol=1e-3, atol=1e-3)
