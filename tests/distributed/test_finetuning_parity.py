"""Adapters and frozen variables train on every strategy as on one device.

"folder" begins with a model that transformers saved, of which each rank reads what it holds.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.distributed.parity import largest_error, loss_error, overall_error, run_cases
from tfbig.interop.hugging_face_folder import HuggingFaceFolder

TOLERANCE = 1e-5
SGD = {"optimizer": "sgd", "learning_rate": 0.5, "clip_norm": 0.5, "weight_decay": 0.01}
SGD |= {"ema_decay": 0.5}
FOLDER = str(Path(__file__).parents[1] / "interop/golden/gpt_neox")
KINDS = {
    "lora": (SGD, {"lora_rank": 3, "lora_alpha": 24.0}),
    "frozen": (
        SGD | {"freeze": ["embedding_layer", "transformer_blocks/0", "*/att/out/bias"]},
        {"tied_head": False},
    ),
    "folder": (SGD, {**HuggingFaceFolder(FOLDER).model_fields(), "lora_rank": 3}),
}
PIPELINE, HOROVOD = {"strategy": "pipeline"}, {"strategy": "horovod"}
T2 = {**PIPELINE, "tensor_parallel_degree": 2}
P2 = {**PIPELINE, "pipeline_parallel_degree": 2, "microbatches": 2}
BLOCK = {"activation_checkpointing": "block", "microbatches": 2}
ZERO1, ZERO2, ZERO3 = (
    {flag: True} for flag in ("shard_optimizer_state", "shard_gradients", "shard_parameters")
)
LAYOUTS = {
    # name: (processes, fields)
    "horovod": (2, HOROVOD),
    "t2": (2, T2),
    "t2_sequence": (2, {**T2, "sequence_parallel": True, "microbatches": 2}),
    "p2": (2, P2),
    "zero1": (2, HOROVOD | ZERO1),
    "zero2": (2, HOROVOD | ZERO2),
    "zero3": (2, HOROVOD | ZERO3 | BLOCK),
    "zero3_t2": (2, T2 | ZERO3),
    "zero1_p2": (2, P2 | ZERO1),
    "zero1_d2t2": (4, T2 | ZERO1),
    "zero1_d2p2": (4, P2 | ZERO1),
}
CASES = [("horovod", "lora"), ("horovod", "frozen"), ("t2", "lora")]
# Of two stages the first has nothing to train of "frozen".
CASES += [("t2_sequence", "lora"), ("t2_sequence", "frozen"), ("p2", "lora"), ("p2", "frozen")]
CASES += [("zero1", "lora"), ("zero1_p2", "frozen"), ("zero2", "frozen")]
CASES += [("zero3", "lora"), ("zero3", "frozen"), ("zero3_t2", "folder")]
CASES += [("zero1_d2t2", "frozen"), ("zero1_d2p2", "lora")]
SHARED = [("zero1", "lora"), ("zero2", "frozen"), ("zero3", "lora"), ("zero3", "frozen")]
ADAMW = {"optimizer": "adamw", "learning_rate": 3e-3, "deterministic": True}
BFLOAT16 = {**ADAMW, "precision": "bfloat16"}
RESUMED = {
    # name: (kind, fields, fields of the second trainer)
    "resumed_zero1": ("lora", {**BFLOAT16, **HOROVOD, **ZERO1}, {}),
    "resumed_zero3": ("frozen", {**BFLOAT16, **HOROVOD, **ZERO3}, {}),
    "moved_to_mesh": ("lora", {**ADAMW, **HOROVOD, **ZERO2}, T2 | ZERO3),
}


def case(name: str, kind: str, layout: dict, **more: object) -> dict:
    fields, model = KINDS[kind]
    more |= {"init_from": FOLDER} if kind == "folder" else {}
    return {"name": name, "steps": 4, "fields": fields | layout, "model": model, **more}


def cases_of(world: int) -> list[dict]:
    return [
        case(f"{name}_{kind}", kind, LAYOUTS[name][1])
        for name, kind in CASES
        if LAYOUTS[name][0] == world
    ]


@pytest.fixture(scope="module")
def saw(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("finetuning")
    single = {"strategy": "single"}
    alone = [case(f"single_{kind}", kind, single) for kind in KINDS]
    alone.append(case("single_bfloat16", "lora", BFLOAT16 | single))
    both = cases_of(2)
    both.append(case("broken", "lora", HOROVOD | ZERO3, **{"break": "missing_scatter_sum"}))
    both += [  # the last ones: what is deterministic stays so in a process
        case(name, kind, fields, brief=True, resume=second)
        for name, (kind, fields, second) in RESUMED.items()
    ]
    results = run_cases(folder, 1, alone, 300) | run_cases(folder, 2, both, 900)
    return results | run_cases(folder, 4, cases_of(4), 600)


def trained_paths(seen: dict) -> set[str]:
    return {path.removeprefix("gradient/") for path in seen if path.startswith("gradient/")}


def state_paths(seen: dict, prefix: str) -> set[str]:
    return {path.removeprefix(prefix) for path in seen if path.startswith(prefix)}


def weights_of(seen: dict) -> dict[str, np.ndarray]:
    paths = {
        path for path in state_paths(seen, "state/") if not path.startswith(("optimizer", "ema"))
    }
    return {path: seen[f"state/{path}"] for path in paths}


@pytest.mark.distributed
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_trained_has_no_gradient_and_no_slot_and_stays(saw, kind):
    seen = saw[f"single_{kind}"]
    trained, weights = trained_paths(seen), set(weights_of(seen))
    if kind != "frozen":
        assert trained == {path for path in weights if "/lora_" in path} and len(trained) == 16
    else:
        assert weights - trained == {
            path
            for path in weights
            if path.startswith(("embedding_layer", "transformer_blocks/0/"))
            or path.endswith("att/out/bias")
        }
    assert 0 < len(trained) < len(weights)
    assert state_paths(seen, "state/ema/") == trained
    assert any(np.any(seen[f"gradient/{path}"] != 0) for path in trained)


@pytest.mark.distributed
@pytest.mark.parametrize("name, kind", CASES)
def test_training_equals_one_device(saw, name, kind):
    one, other = saw[f"single_{kind}"], saw[f"{name}_{kind}"]
    assert loss_error(other, one) < TOLERANCE
    for prefix in ("gradient/", "state/"):
        assert state_paths(other, prefix) == state_paths(one, prefix)
        error, path = largest_error(other, one, prefix)
        assert error < TOLERANCE, path
    for path in weights_of(one).keys() - trained_paths(one):
        np.testing.assert_array_equal(other[f"state/{path}"], one[f"state/{path}"], path)
    for field in ("evaluation", "averaged_evaluation"):
        np.testing.assert_allclose(other[field], one[field], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(other["decoded"], one["decoded"], rtol=1e-4, atol=1e-4)
    assert np.any(one["averaged_evaluation"] != one["evaluation"])


@pytest.mark.distributed
@pytest.mark.parametrize("name, kind", SHARED)
def test_ranks_share_slots_of_what_is_trained_and_zero3_the_rest_too(saw, name, kind):
    seen = saw[f"{name}_{kind}"]
    sizes = {path: weight.size for path, weight in weights_of(seen).items()}
    trained = sum(sizes[path] for path in trained_paths(seen))
    frozen = sum(sizes.values()) - trained
    most_padding = len(sizes)  # at most one element a bucket, of which there are fewer
    for held, whole, parts in (
        (seen["held_ema/slots"], trained, 2),
        (seen["held_frozen"], frozen, 2 if name == "zero3" else 1),
    ):
        assert held[0] == held[1], "ranks hold as much"
        assert 0 <= held[0] - whole / parts <= most_padding


@pytest.mark.distributed
def test_a_missing_sum_is_found(saw):
    error, _ = largest_error(saw["broken"], saw["single_lora"], "gradient/")
    assert error > 1000 * TOLERANCE


@pytest.mark.distributed
@pytest.mark.parametrize("name", RESUMED)
def test_saved_state_goes_on(saw, name):
    seen = saw[name]
    assert np.std(seen["went_on"]) > 0
    if name.startswith("resumed"):
        np.testing.assert_array_equal(seen["resumed"], seen["went_on"])
    else:
        np.testing.assert_allclose(seen["resumed"], seen["went_on"], rtol=TOLERANCE)


@pytest.mark.distributed
def test_in_16_bits_what_is_saved_is_exact(saw):
    seen, one = saw["resumed_zero1"], saw["single_bfloat16"]
    assert overall_error(seen, one, "gradient/") < 0.05
    trained = trained_paths(seen)
    for path, weight in weights_of(seen).items():
        assert weight.dtype == np.float32
        if path not in trained:
            np.testing.assert_array_equal(weight, one[f"state/{path}"], path)
    adapter = seen["state/transformer_blocks/1/ffn/up/lora_a"]
    assert np.any(adapter.view(np.uint32) & 0xFFFF), "rounded to bfloat16"
