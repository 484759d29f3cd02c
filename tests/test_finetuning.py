"""Adapters and frozen variables: what is trained, kept, resumed, merged and refused."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.conftest import SMALL_LENGTH
from tfbig import evaluate, export, train
from tfbig.adapters import MergedReader
from tfbig.checkpoint import list_checkpoints
from tfbig.checkpoint_reader import CheckpointReader
from tfbig.command_config import EvaluateConfig
from tfbig.config import ModelConfig, count_parameters
from tfbig.errors import UserError
from tfbig.export_config import ExportConfig
from tfbig.interop.hugging_face_folder import HuggingFaceFolder
from tfbig.run_folder import RunFolder, read_metrics
from tfbig.saved_run import SavedRun
from tfbig.variables import is_adapter, num_trained_parameters, variable_specs

LORA = ["--lora_rank=4", "--lora_alpha=32", "--learning_rate=0.02"]


def train_here(*flags: str) -> int:
    return train._body(["--tensorboard=false", "--eval_every=0", *flags])


def last_checkpoint(run: str) -> CheckpointReader:
    return CheckpointReader(list_checkpoints(RunFolder(run).checkpoints_dir)[-1].path)


@pytest.fixture(scope="module")
def base(tmp_path_factory, small_flags) -> str:
    folder = str(tmp_path_factory.mktemp("base") / "run")
    assert train_here(*small_flags, f"--run_dir={folder}", "--steps=4") == 0
    return folder


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, small_flags, base) -> str:
    """A run with adapters on the base's weights, stopped once and resumed."""
    folder = str(tmp_path_factory.mktemp("tuned") / "run")
    flags = [*small_flags, *LORA, f"--run_dir={folder}", "--deterministic", "--ema_decay=0.5"]
    flags.append(f"--init_from={last_checkpoint(base).directory}")
    assert train_here(*flags, "--steps=3") == 0
    assert train_here(*flags, "--steps=6") == 0
    return folder


def test_only_adapters_change_and_only_they_have_slots(base, tuned):
    before, after = last_checkpoint(base), last_checkpoint(tuned)
    assert [record["step"] for record in read_metrics(tuned)] == [1, 2, 3, 4, 5, 6]
    paths = [path for path in after.paths() if not path.startswith(("optimizer/", "ema/"))]
    adapters = [path for path in paths if is_adapter(path)]
    assert len(adapters) == 8
    for path in paths:
        has_slots = after.has(f"optimizer/m/{path}")
        assert has_slots == after.has(f"ema/{path}") == (path in adapters)
        if path in adapters:
            assert np.any(after.read(path) != 0)
        else:
            np.testing.assert_array_equal(after.read(path), before.read(path))


def test_the_number_of_parameters_is_exact():
    for model in (ModelConfig(lora_rank=3), ModelConfig(lora_rank=5, head_dim=7, num_heads=3)):
        specs = variable_specs(model)
        assert count_parameters(model) == sum(spec.num_elements for spec in specs)
        trained = sum(spec.num_elements for spec in specs if is_adapter(spec.path))
        assert num_trained_parameters(model) == trained


def test_merged_weights_compute_what_adapters_do(tuned):
    from tfbig.model.gpt import GPT

    saved = SavedRun.open(tuned)
    beside = GPT.from_config(saved.config.model, initial_values=False)
    for path, variable in beside.canonical_variables().items():
        variable.assign(saved.reader.read(path))
    merged = GPT.from_config(saved.merged_model, initial_values=False)
    weights = saved.merged_weights("model")
    for path, variable in merged.canonical_variables().items():
        variable.assign(weights.read(path))
    tokens = np.random.default_rng(0).integers(0, 384, (3, SMALL_LENGTH)).astype(np.int32)
    one, other = beside(tokens).numpy(), merged(tokens).numpy()
    assert np.abs(one - other).max() < 1e-5
    path = "transformer_blocks/0/att/qkv/kernel"
    assert np.abs(weights.read(path) - saved.reader.read(path)).max() > 1e-4


def test_any_rectangle_of_merged_weights_is_that_of_the_whole(tuned):
    weights = SavedRun.open(tuned).merged_weights("ema")
    assert isinstance(weights, MergedReader)
    random = np.random.default_rng(0)
    for name in ("att/qkv", "att/out", "ffn/up", "ffn/down"):
        path = f"transformer_blocks/0/{name}/kernel"
        whole = weights.read(path)
        for _ in range(5):
            start = tuple(int(random.integers(0, size)) for size in whole.shape)
            shape = tuple(
                int(random.integers(1, size - first + 1))
                for size, first in zip(whole.shape, start, strict=True)
            )
            slices = tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))
            part = weights.read(path, start, shape)
            np.testing.assert_allclose(part, whole[slices], rtol=0, atol=1e-7)


def test_exported_and_evaluated_alike(tuned, tmp_path):
    output = export.run(ExportConfig(run=tuned, output=str(tmp_path / "hf")))
    names = load_file(output / "model.safetensors")
    assert not any("lora" in name for name in names)
    folder = HuggingFaceFolder(output)
    weights = SavedRun.open(tuned).merged_weights("model")
    for path in folder.paths():
        np.testing.assert_array_equal(folder.read(path), weights.read(path))
    losses = [
        evaluate.run(EvaluateConfig(run=tuned, weights=kind), {})["loss"]
        for kind in ("model", "ema")
    ]
    assert losses[0] != losses[1] and abs(losses[0] - losses[1]) < 0.5


def test_a_model_without_adapters_starts_from_merged_ones(tuned, small_flags, tmp_path):
    checkpoint = last_checkpoint(tuned).directory
    flags = [*small_flags, f"--init_from={checkpoint}", "--learning_rate=0", "--weight_decay=0"]
    assert train_here(*flags, f"--run_dir={tmp_path / 'on'}", "--steps=1") == 0
    merged = SavedRun.open(tuned).merged_weights("model")
    after = last_checkpoint(str(tmp_path / "on"))
    for spec in variable_specs(SavedRun.open(tuned).merged_model):
        np.testing.assert_array_equal(after.read(spec.path), merged.read(spec.path))
    with pytest.raises(UserError, match=r"--lora_alpha=32\.0, this run of 8\.0"):
        train_here(*small_flags, "--lora_rank=4", "--lora_alpha=8", f"--init_from={checkpoint}")
    with pytest.raises(UserError, match="lora_a"):
        train_here(*small_flags, "--lora_rank=2", "--lora_alpha=32", f"--init_from={checkpoint}")


def test_an_older_runs_identity_lacks_the_new_fields():
    from tfbig.run_state import identity

    plain = identity(train.config_from({"data": "x"}), {}, 1)
    assert not {"model.lora_rank", "model.lora_alpha", "optimizer.freeze"} & plain.keys()
    tuned = identity(train.config_from({"data": "x", "lora_rank": 2, "freeze": ["a"]}), {}, 1)
    assert tuned["model.lora_rank"] == 2 and tuned["optimizer.freeze"] == ["a"]


def test_frozen_variables_stay(base, small_flags, tmp_path):
    checkpoint = last_checkpoint(base)
    flags = [*small_flags, f"--init_from={checkpoint.directory}", f"--run_dir={tmp_path / 'run'}"]
    flags += ["--freeze=embedding_layer", "--freeze=transformer_blocks/*/ffn/*"]
    assert train_here(*flags, "--steps=2") == 0
    assert train_here(*flags, "--steps=3") == 0
    after = last_checkpoint(str(tmp_path / "run"))
    changed = 0
    for spec in variable_specs(SavedRun.open(base).config.model):
        frozen = spec.path.startswith("embedding_layer") or "/ffn/" in spec.path
        same = np.array_equal(after.read(spec.path), checkpoint.read(spec.path))
        assert same == frozen and after.has(f"optimizer/m/{spec.path}") != frozen
        changed += not same
    assert changed > 5


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--freeze=embeding_layer"], "matches no variable"),
        (["--freeze=*"], "leaves nothing to train"),
        (["--lora_rank=-1"], "--lora_rank=-1"),
        (["--lora_rank=2", "--lora_alpha=0"], "--lora_alpha=0"),
    ],
)
def test_what_cannot_be_tuned_is_refused(small_flags, flags, words):
    with pytest.raises(UserError) as error:
        train_here(*small_flags, *flags, "--run_dir=nowhere")
    assert words in str(error.value)


def test_prompts_and_other_documents_have_no_gradient_at_all():
    """Of packed rows: exact zeros, at the logits of prompts and at other documents' inputs."""
    import tensorflow as tf

    from tfbig.loss import head_loss
    from tfbig.model.context import make_context
    from tfbig.model.gpt import GPT

    config = ModelConfig(vocab_size=50, max_length=12, embed_dim=16, num_layers=2, num_heads=2)
    model = GPT.from_config(config, seed=1)
    random = np.random.default_rng(0)
    document_ids = np.array([[0] * 5 + [1] * 5 + [2] * 3] * 2, np.int32)
    mask = np.array([[0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 0, 1]] * 2, np.uint8)  # prompts of 2, 3 and 1
    batch = {
        "tokens": tf.constant(random.integers(0, 50, (2, 13)), tf.int32),
        "sample_index": tf.range(2, dtype=tf.int64),
        "document_ids": tf.constant(document_ids),
    }
    context = make_context(batch, tf.constant(0), training=False)
    for own in range(3):
        only_own = mask * (document_ids[:, :-1] == own)
        with tf.GradientTape() as tape:
            inputs = model.embed(batch["tokens"][:, :-1], context)
            tape.watch(inputs)
            hidden = inputs
            for block in model.transformer_blocks:
                hidden = block(hidden, context=context)
            logits = model.logits(hidden)
            tape.watch(logits)
            loss = head_loss(logits, batch["tokens"][:, 1:], tf.constant(only_own))[0]
        of_inputs, of_logits = (g.numpy() for g in tape.gradient(loss, [inputs, logits]))
        assert np.all(of_logits[only_own == 0] == 0) and np.all(of_logits[only_own == 1] != 0)
        others = document_ids[:, :-1] != own
        assert np.all(of_inputs[others] == 0) and np.any(of_inputs[~others] != 0)
