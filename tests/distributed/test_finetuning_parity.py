"""Adapters and frozen variables train on every strategy as on one device."""

import numpy as np
import pytest

from tests.distributed.parity import largest_error, loss_error, run_cases

TOLERANCE = 1e-5
SGD = {"optimizer": "sgd", "learning_rate": 0.5, "clip_norm": 0.5, "weight_decay": 0.01}
KINDS = {
    "lora": (SGD, {"lora_rank": 3, "lora_alpha": 24.0}),
    "frozen": (
        SGD | {"freeze": ["embedding_layer", "transformer_blocks/0", "*/att/out/bias"]},
        {"tied_head": False},
    ),
}
LAYOUTS = {
    "horovod": {"strategy": "horovod"},
    "t2": {"strategy": "pipeline", "tensor_parallel_degree": 2},
    "t2_sequence": {
        "strategy": "pipeline",
        "tensor_parallel_degree": 2,
        "sequence_parallel": True,
        "microbatches": 2,
    },
    "p2": {"strategy": "pipeline", "pipeline_parallel_degree": 2, "microbatches": 2},
}
CASES = [("horovod", "lora"), ("horovod", "frozen"), ("t2", "lora")]
# Of two stages the first would have nothing to train of "frozen".
CASES += [("t2_sequence", "lora"), ("t2_sequence", "frozen"), ("p2", "lora")]


def case(name: str, kind: str, layout: dict) -> dict:
    fields, model = KINDS[kind]
    return {"name": f"{name}_{kind}", "steps": 4, "fields": fields | layout, "model": model}


@pytest.fixture(scope="module")
def saw(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("finetuning")
    single = [case("single", kind, {"strategy": "single"}) for kind in KINDS]
    others = [case(name, kind, LAYOUTS[name]) for name, kind in CASES]
    return run_cases(folder, 1, single, 300) | run_cases(folder, 2, others, 600)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_trained_has_no_gradient_and_no_slot_and_stays(saw, kind):
    seen = saw[f"single_{kind}"]
    trained = {path.removeprefix("gradient/") for path in seen if path.startswith("gradient/")}
    state = {path.removeprefix("state/") for path in seen if path.startswith("state/")}
    weights = {path for path in state if not path.startswith("optimizer/")}
    if kind == "lora":
        assert trained == {path for path in weights if "/lora_" in path} and len(trained) == 16
    else:
        assert weights - trained == {
            path
            for path in weights
            if path.startswith(("embedding_layer", "transformer_blocks/0/"))
            or path.endswith("att/out/bias")
        }
    assert 0 < len(trained) < len(weights)
    assert any(np.any(seen[f"gradient/{path}"] != 0) for path in trained)


@pytest.mark.distributed
@pytest.mark.parametrize("name, kind", CASES)
def test_training_equals_one_device(saw, name, kind):
    one, other = saw[f"single_{kind}"], saw[f"{name}_{kind}"]
    assert loss_error(other, one) < TOLERANCE
    for prefix in ("gradient/", "state/transformer_blocks"):
        error, path = largest_error(other, one, prefix)
        assert error < TOLERANCE, path
    np.testing.assert_allclose(other["evaluation"], one["evaluation"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(other["decoded"], one["decoded"], rtol=1e-4, atol=1e-4)
