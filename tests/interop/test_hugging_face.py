"""Hugging Face folders that transformers made (golden/): read, trained from, written."""

import contextlib
import json
import math
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from data_pipeline.dataset import TokenData
from tests.conftest import SMALL_LENGTH
from tests.interop.configurations import GOLDEN
from tfbig import export, train
from tfbig.config import ModelConfig
from tfbig.errors import UserError
from tfbig.export_config import ExportConfig
from tfbig.interop.hugging_face_export import ExportedTokenizer, architecture_for, write_folder
from tfbig.interop.hugging_face_folder import HuggingFaceFolder
from tfbig.interop.initial_weights import check_tokenizer, open_initial, tokenizer_folder
from tfbig.variables import variable_specs

GOLDEN_FOLDER = Path(__file__).parent / "golden"
TOKENIZER = ExportedTokenizer(b"{}", 384, "<|endoftext|>", 0)
EXACT = [name for name in GOLDEN if name != "gpt2_scores_by_layer"]


def filled_model(folder: HuggingFaceFolder):
    from tfbig.model.gpt import GPT

    model = GPT.from_config(folder.model, initial_values=False)
    for path, variable in model.canonical_variables().items():
        variable.assign(folder.read(path))
    return model


def copy_of(name: str, target: Path) -> Path:
    return Path(shutil.copytree(GOLDEN_FOLDER / name, target / name))


def change_config(folder: Path, **values) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


@pytest.mark.parametrize("name", GOLDEN)
def test_logits_are_those_of_transformers(name):
    expected = load_file(GOLDEN_FOLDER / f"{name}.safetensors")
    model = filled_model(HuggingFaceFolder(GOLDEN_FOLDER / name))
    logits = model(expected["tokens"]).numpy()
    assert expected["logits"].std() > 0.1
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", GOLDEN)
def test_shapes_are_the_models_and_any_rectangle_is_that_of_the_whole(name):
    folder = HuggingFaceFolder(GOLDEN_FOLDER / name)
    specs = {spec.path: spec.shape for spec in variable_specs(folder.model)}
    assert folder.paths() == sorted(specs)
    random = np.random.default_rng(0)
    for path, shape in specs.items():
        assert folder.shape(path) == shape
        whole = folder.read(path)
        assert whole.shape == shape and whole.dtype == np.float32 and np.any(whole != 0)
        for _ in range(4):
            start = tuple(int(random.integers(0, size)) for size in shape)
            part = tuple(
                int(random.integers(1, size - first + 1))
                for size, first in zip(shape, start, strict=True)
            )
            slices = tuple(slice(a, a + n) for a, n in zip(start, part, strict=True))
            np.testing.assert_array_equal(folder.read(path, start, part), whole[slices])


@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
@pytest.mark.parametrize("name", EXACT)
def test_what_was_read_is_written_back_bit_by_bit(name, max_shard_bytes, tmp_path):
    folder = HuggingFaceFolder(GOLDEN_FOLDER / name)
    write_folder(tmp_path, folder, folder.model, TOKENIZER, max_shard_bytes=max_shard_bytes)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 2) == (max_shard_bytes < 10**9)
    written = {}
    for file in files:
        written |= load_file(file)
        assert file.stat().st_size < max_shard_bytes + 55_000  # one tensor has 50,048 bytes
    original = load_file(GOLDEN_FOLDER / name / "model.safetensors")
    assert written.keys() == original.keys()
    for key, value in original.items():
        np.testing.assert_array_equal(written[key], value)
    again = HuggingFaceFolder(tmp_path)
    assert again.model == folder.model
    config = json.loads((tmp_path / "config.json").read_text())
    before = json.loads((GOLDEN_FOLDER / name / "config.json").read_text())
    for key in ("architectures", "model_type", "tie_word_embeddings", "vocab_size"):
        assert config[key] == before[key]
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    assert settings["suppress_tokens"] == [384, 385, 386, 387, 388, 389, 390]


def test_half_precision_is_read_as_float32_and_written(tmp_path):
    folder = HuggingFaceFolder(GOLDEN_FOLDER / "gpt_neox")
    write_folder(tmp_path, folder, folder.model, TOKENIZER, dtype="bfloat16")
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    path = "transformer_blocks/1/att/qkv/kernel"
    again, exact = HuggingFaceFolder(tmp_path).read(path), folder.read(path)
    assert again.dtype == np.float32 and not np.array_equal(again, exact)
    np.testing.assert_allclose(again, exact, rtol=2**-8)


def test_bare_names_and_masks_of_old_files(tmp_path):
    """Early files have names without a prefix, and the causal mask as a tensor of each block."""
    folder = copy_of("gpt2_n_inner", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    bare["h.0.attn.bias"] = np.tril(np.ones((1, 1, 48, 48), np.uint8))
    bare["lm_head.weight"] = bare["wte.weight"]  # a tied head that is stored all the same
    save_file(bare, folder / "model.safetensors")
    read, original = HuggingFaceFolder(folder), HuggingFaceFolder(GOLDEN_FOLDER / "gpt2_n_inner")
    assert read.paths() == original.paths()
    for path in read.paths():
        np.testing.assert_array_equal(read.read(path), original.read(path))


def broken_folders() -> dict:
    def rename(folder: Path, old: str, new: str) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors[new] = tensors.pop(old)
        save_file(tensors, folder / "model.safetensors")

    def pickled(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")

    def outside(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        index = {"weight_map": {"a": "../model.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    def cut(folder: Path) -> None:
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[:-1])

    def quantised(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors["gpt_neox.final_layer_norm.weight"] = np.ones(32, np.int8)
        save_file(tensors, folder / "model.safetensors")

    norm = "gpt_neox.final_layer_norm.weight"
    return {
        "pickle": (pickled, "pickle, which can run any code"),
        "another architecture": (
            lambda f: change_config(f, model_type="llama"),
            "model_type 'llama'; tfbig reads gpt2, gpt_neox",
        ),
        "stretched angles": (
            lambda f: change_config(f, rope_parameters={"rope_type": "yarn"}),
            "type 'yarn'",
        ),
        "odd rotary dims": (
            lambda f: change_config(f, rope_parameters={"partial_rotary_factor": 0.4}),
            "turns 3 dims of a head",
        ),
        "an activation": (lambda f: change_config(f, hidden_act="silu"), "'silu'"),
        "a missing tensor": (lambda f: rename(f, norm, "x"), "lacks the tensor final_layer_norm"),
        "another shape": (lambda f: change_config(f, vocab_size=392), "has shape (391, 32)"),
        "an adapter": (
            lambda f: save_file(
                load_file(f / "model.safetensors") | {"layers.0.lora_A": np.ones(2, np.float32)},
                f / "model.safetensors",
            ),
            "holds layers.0.lora_A",
        ),
        "a file elsewhere": (outside, "'../model.safetensors'"),
        "a cut file": (cut, "is damaged"),
        "quantised weights": (quantised, "stored as int8"),
        "damaged JSON": (lambda f: (f / "config.json").write_text("{"), "not JSON"),
        "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
    }


@pytest.mark.parametrize("name", broken_folders())
def test_what_cannot_be_read_is_refused(name, tmp_path):
    break_it, words = broken_folders()[name]
    folder = copy_of("gpt_neox", tmp_path)
    break_it(folder)
    with pytest.raises(UserError) as error:
        HuggingFaceFolder(folder)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_header_that_lies_is_no_crash(tmp_path):
    folder = copy_of("gpt_neox", tmp_path)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    with pytest.raises(UserError, match="damaged"):
        HuggingFaceFolder(folder)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"norm_order": "post"}, "--norm_order=post"),
        ({"final_norm": False}, "--nofinal_norm"),
        ({"tied_head": False, "head_bias": True}, "--head_bias"),
        ({"head_dim": 8}, "--head_dim=8"),
        ({"parallel_residual": True}, "--parallel_residual with learned positions"),
    ],
)
def test_models_that_no_architecture_fits(fields, words):
    with pytest.raises(UserError) as error:
        architecture_for(ModelConfig(embed_dim=32, num_heads=2, **fields))
    assert words in str(error.value) and "--format=keras" in str(error.value)


@pytest.fixture(scope="module")
def hugging_face_run(tmp_path_factory, small_data) -> str:
    """A run that begins at a golden folder with the small data's tokenizer, and learns nothing."""
    base = tmp_path_factory.mktemp("from_hugging_face")
    folder = copy_of("gpt_neox", base)
    shutil.copy(Path(small_data) / "tokenizer.json", folder)
    flags = [f"--init_from={folder}", f"--data={small_data}", f"--run_dir={base / 'run'}"]
    flags += [f"--sequence_length={SMALL_LENGTH}", "--global_batch=4", "--learning_rate=0"]
    flags += ["--steps=1", "--weight_decay=0", "--tensorboard=false"]
    assert train._body(flags) == 0
    return str(base / "run")


def test_training_starts_from_a_folder_and_gives_it_back(hugging_face_run, tmp_path):
    output = export.run(ExportConfig(run=hugging_face_run, output=str(tmp_path / "hf")))
    original = load_file(GOLDEN_FOLDER / "gpt_neox" / "model.safetensors")
    written = load_file(output / "model.safetensors")
    assert written.keys() == original.keys()
    for key, value in original.items():
        np.testing.assert_array_equal(written[key], value)
    tokenizer = Path(hugging_face_run) / "tokenizer.json"
    assert (output / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    with pytest.raises(UserError, match="exists"):
        export.run(ExportConfig(run=hugging_face_run, output=str(tmp_path / "hf")))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_rows_that_are_no_token_can_be_left_out(hugging_face_run, tmp_path):
    output = export.run(
        ExportConfig(run=hugging_face_run, output=str(tmp_path / "hf"), trim_vocabulary=True)
    )
    folder = HuggingFaceFolder(output)
    assert folder.model.vocab_size == 384
    original = HuggingFaceFolder(GOLDEN_FOLDER / "gpt_neox")
    for path in ("embedding_layer/token_emb/embeddings", "dense/kernel"):
        whole = original.read(path)
        expected = whole[:384] if path.startswith("embedding") else whole[:, :384]
        np.testing.assert_array_equal(folder.read(path), expected)
    assert "suppress_tokens" not in json.loads((output / "generation_config.json").read_text())


def test_a_keras_file_gives_the_same_logits(hugging_face_run, tmp_path):
    import keras

    output = export.run(
        ExportConfig(run=hugging_face_run, output=str(tmp_path / "m.keras"), format="keras")
    )
    assert [path.name for path in tmp_path.iterdir()] == ["m.keras"]
    expected = load_file(GOLDEN_FOLDER / "gpt_neox.safetensors")
    logits = keras.models.load_model(output)(expected["tokens"]).numpy()
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=2e-5)


def test_a_saved_model_gives_logits_and_writes_on(hugging_face_run, tmp_path):
    import tensorflow as tf

    output = export.run(
        ExportConfig(run=hugging_face_run, output=str(tmp_path / "served"), format="saved_model")
    )
    assert (output / "1" / "saved_model.pb").is_file()
    signatures = tf.saved_model.load(output / "1").signatures
    expected = load_file(GOLDEN_FOLDER / "gpt_neox.safetensors")
    tokens = expected["tokens"]
    logits = signatures["serving_default"](tokens=tf.constant(tokens))["logits"].numpy()
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=2e-5)

    def generate(prompts, lengths, count):
        made = signatures["generate"](
            tokens=tf.constant(prompts),
            num_tokens=tf.constant(lengths),
            max_tokens=tf.constant(count),
            temperature=tf.constant(0.0),
            seed=tf.constant(0),
        )
        return made["tokens"].numpy(), made["num_tokens"].numpy()

    text, lengths = generate(np.concatenate([tokens, tokens]), [16, 5], 3)
    model = filled_model(HuggingFaceFolder(GOLDEN_FOLDER / "gpt_neox"))
    for row, length in ((0, 16), (1, 5)):
        words = list(tokens[0, :length])
        for _ in range(3):
            words.append(int(np.argmax(model(np.array([words], np.int32)).numpy()[0, -1, :384])))
        assert words == list(text[row, : lengths[row]])
    assert generate(tokens, [16], 100)[1][0] <= 48, "the model's positions are a limit"


def test_another_tokenizer_than_the_weights_is_refused(tmp_path, small_data):
    folder = copy_of("gpt_neox", tmp_path)
    description = json.loads((Path(small_data) / "tokenizer.json").read_text())
    merges = description["model"]["merges"]
    flags = [f"--init_from={folder}", f"--data={small_data}", f"--run_dir={tmp_path / 'run'}"]
    flags += [f"--sequence_length={SMALL_LENGTH}", "--global_batch=4", "--steps=1"]
    # The older spelling of merges is the same tokenizer.
    description["model"]["merges"] = [" ".join(pair) for pair in merges]
    (folder / "tokenizer.json").write_text(json.dumps(description))
    assert train._body([*flags, "--tensorboard=false"]) == 0
    description["model"]["merges"] = [*merges[1:], merges[0]]
    (folder / "tokenizer.json").write_text(json.dumps(description))
    with pytest.raises(UserError, match="--tokenizer="):
        train._body([*flags, "--restart"])


def test_a_vocabulary_and_its_merges_are_the_folders_tokenizer(tmp_path, small_data):
    """As older versions of transformers saved it, without a tokenizer.json."""
    folder, data = copy_of("gpt_neox", tmp_path), TokenData.open(small_data)
    check_tokenizer(str(folder), data)  # no tokenizer, nothing to compare
    model = json.loads((Path(small_data) / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    for merges, fits in ((model["merges"], True), (model["merges"][::-1], False)):
        lines = "".join(" ".join(pair) + "\n" for pair in merges)
        (folder / "merges.txt").write_text("#version: 0.2\n" + lines)
        assert tokenizer_folder(str(folder)) == str(folder)
        with contextlib.nullcontext() if fits else pytest.raises(UserError, match="--tokenizer="):
            check_tokenizer(str(folder), data)


def test_flags_of_shape_contradict_the_folder():
    with pytest.raises(UserError, match="embedding_layer/token_emb/embeddings"):
        open_initial(
            train.config_from(
                {"init_from": str(GOLDEN_FOLDER / "gpt_neox"), "vocab_size": 400, "data": "x"}
            )
        )
    config = train.config_from(
        {"init_from": str(GOLDEN_FOLDER / "gpt_neox"), "dropout": 0.25, "data": "x"}
    )
    assert config.model.dropout == 0.25 and config.model.embed_dim == 32
    assert math.isclose(config.model.rotary_fraction, 0.25)
