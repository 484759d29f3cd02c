"""mirrored and multi_worker train what one device trains; faults put in on purpose are found."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.launch import run_cluster
from tests.distributed.parity import (
    TRUE_VOCABULARY,
    WORKER,
    Saw,
    largest_error,
    loss_error,
    overall_error,
    run_cases,
)

TOLERANCE = 1e-5
KERNEL = "gradient/transformer_blocks/0/att/qkv/kernel"
# No clipping: a gradient that is clipped to a norm hides a wrong scale.
SGD = {"optimizer": "sgd", "learning_rate": 0.1, "clip_norm": 0.0, "weight_decay": 0.01}
TERMS = {"z_loss": 1e-3, "label_smoothing": 0.1}
ADAMW = {"optimizer": "adamw", "learning_rate": 3e-3, **TERMS}
DROPOUT = {"dropout": 0.2, "attention_dropout": 0.1, "embedding_dropout": 0.1}
NEOX = {
    **DROPOUT,
    "position_embedding": "rotary",
    "rotary_fraction": 0.5,
    "parallel_residual": True,
    "activation": "gelu",
    "tied_head": False,
}
CASES = {
    # name: (fields, model)
    "sgd": ({**SGD, "layer_grad_norms": True}, NEOX),
    "adamw": ({**ADAMW, "ema_decay": 0.5}, DROPOUT),
    "untied_adamw": ({**ADAMW, "microbatches": 4}, NEOX),
    "accumulated": ({**SGD, "microbatches": 4, "layer_grad_norms": True}, NEOX),
    "bfloat16": ({**SGD, "precision": "bfloat16", "microbatches": 2}, NEOX),
    "float16": ({**SGD, "precision": "float16", "initial_loss_scale": 1024.0}, NEOX),
    "tied": (SGD, DROPOUT),
    "tied_bfloat16": ({**SGD, "precision": "bfloat16"}, DROPOUT),
}
BRIEF = ("untied_adamw", "bfloat16", "float16", "tied", "tied_bfloat16")
# What must not change a result, where the reference does without.
COMPILED = {"accumulated": {"jit_compile": True}}
OVERFLOW = {"precision": "float16", "initial_loss_scale": 1024.0}
FLOAT32 = ("sgd", "adamw", "untied_adamw", "accumulated", "tied")
ON_FOUR = (*FLOAT32, "bfloat16")
# The first three sum or feed wrongly; the last one changes dropout's masks alone.
FAULTS = ("missing_allreduce", "mean_of_means", "same_rows", "local_sample_index")


def cases(strategy: dict, names: Iterable[str] = tuple(CASES), suffix: str = "") -> list[dict]:
    return [
        {
            "name": f"{name}{suffix}",
            "fields": {**CASES[name][0], **strategy, **(COMPILED.get(name, {}) if suffix else {})},
            "model": CASES[name][1],
            "brief": name in BRIEF,
        }
        for name in names
    ]


def overflowing(strategy: dict, suffix: str) -> dict:
    return {
        "name": f"overflow{suffix}",
        "fields": {**SGD, **OVERFLOW, **strategy},
        "model": DROPOUT,
        "break": "overflow_on_last_replica",
        "brief": True,
    }


def faulty(strategy: dict) -> list[dict]:
    return [
        {
            "name": fault,
            "fields": {**SGD, **strategy, "microbatches": 1 if fault == FAULTS[0] else 2},
            "model": NEOX,
            "break": fault,
            "brief": True,
        }
        for fault in FAULTS
    ]


@pytest.fixture(scope="module")
def single(tmp_path_factory) -> dict[str, Saw]:
    alone = {"strategy": "single"}
    without = {
        "name": "no dropout",
        "fields": {**SGD, **alone},
        "model": NEOX | dict.fromkeys(DROPOUT, 0.0),
        "brief": True,
        "steps": 1,
    }
    return run_cases(tmp_path_factory.mktemp("single"), 1, [*cases(alone), without], 1200)


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory) -> dict[str, Saw]:
    """All cases of one process, by name and number of devices; the most devices come first."""
    four = {"strategy": "mirrored", "num_devices": 4}
    two = {"strategy": "mirrored", "num_devices": 2}
    all_cases = [
        *cases(four, ON_FOUR, "_4"),
        *cases(two, suffix="_2"),
        *faulty(two),
        overflowing(two, "_2"),
    ]
    return run_cases(tmp_path_factory.mktemp("mirrored"), 1, all_cases, 1500)


@pytest.fixture(scope="module")
def multi_worker(tmp_path_factory) -> dict[str, Saw]:
    """All cases of two processes, in one launch."""
    strategy = {"strategy": "multi_worker"}
    all_cases = [
        *cases(strategy, suffix="_2"),
        *faulty(strategy),
        overflowing(strategy, "_2"),
    ]
    folder: Path = tmp_path_factory.mktemp("multi_worker")
    run_cluster(2, [WORKER, str(folder), json.dumps(all_cases)], 1500)
    return {case["name"]: dict(np.load(folder / f"{case['name']}.npz")) for case in all_cases}


def check_equal(result: Saw, single: dict[str, Saw], name: str) -> None:
    reference = single[name]
    np.testing.assert_allclose(result["losses"], reference["losses"], rtol=TOLERANCE)
    error, path = largest_error(result, reference, "gradient/")
    assert error < TOLERANCE, path
    if "layer_grad_norms" in CASES[name][0]:
        norms = reference["layer_grad_norms"]
        assert norms.shape == (4,) and norms.min() > 0, "embedding, two blocks, head"
        np.testing.assert_allclose(result["layer_grad_norms"], norms, rtol=1e-4)
    if "adamw" not in name:  # under Adam, weights whose true gradient is zero drift by noise
        error, path = largest_error(result, reference, "state/")
        assert error < TOLERANCE, path
    for step in range(3):
        np.testing.assert_allclose(
            result[f"sources/{step}"], reference[f"sources/{step}"], rtol=TOLERANCE
        )
    if name in BRIEF:
        return
    np.testing.assert_allclose(result["evaluation"], reference["evaluation"], rtol=1e-4, atol=1e-4)
    if "ema_decay" in CASES[name][0]:
        averaged = result["averaged_evaluation"]
        np.testing.assert_allclose(averaged, reference["averaged_evaluation"], rtol=1e-4, atol=1e-4)
        assert np.abs(averaged[0] - result["evaluation"][0]).max() > 1e-3, "an average of its own"
    assert np.isneginf(result["decoded"][..., TRUE_VOCABULARY:]).all()
    np.testing.assert_allclose(result["decoded"], reference["decoded"], rtol=1e-3, atol=1e-4)


@pytest.mark.distributed
@pytest.mark.parametrize("num_devices", [2, 4])
@pytest.mark.parametrize("name", FLOAT32)
def test_mirrored_equals_single(mirrored, single, name, num_devices):
    check_equal(mirrored[f"{name}_{num_devices}"], single, name)


@pytest.mark.distributed
@pytest.mark.parametrize("name", FLOAT32)
def test_multi_worker_equals_single(multi_worker, single, name):
    check_equal(multi_worker[f"{name}_2"], single, name)


@pytest.mark.distributed
def test_accumulation_equals_the_large_batch(single):
    check_equal(single["accumulated"], single, "sgd")


@pytest.mark.distributed
def test_dropout_is_on(single):
    first, without = single["sgd"]["losses"][0], single["no dropout"]["losses"][0]
    assert abs(first - without) > 1e-4 * without


@pytest.mark.distributed
def test_float16_takes_its_steps_and_errs_at_most_twice_as_much(single, mirrored, multi_worker):
    for prefix in ("gradient/", "state/"):
        exact = dict(single["sgd"])
        if prefix == "gradient/":  # float16's are multiplied by a scale, which is a power of two
            scale = np.linalg.norm(single["float16"][KERNEL]) / np.linalg.norm(exact[KERNEL])
            scale = 2.0 ** np.round(np.log2(scale))
            exact |= {path: value * scale for path, value in exact.items() if "gradient/" in path}
        allowed = 2 * overall_error(single["float16"], exact, prefix)
        assert 1e-6 < allowed < 0.1, "float16 is really used, and works"
        for saw, size in ((single["float16"], 1), *with_sizes(mirrored, multi_worker)):
            assert saw["applied"].tolist() == [size] * 3, "no step is skipped"
            assert overall_error(saw, exact, prefix) < allowed


def with_sizes(mirrored, multi_worker) -> list[tuple[Saw, int]]:
    return [(mirrored["float16_2"], 1), (multi_worker["float16_2"], 2)]


@pytest.mark.distributed
def test_bfloat16_errs_at_most_twice_as_much_as_on_one_device(single, mirrored, multi_worker):
    saws = {f"mirrored {name}": saw for name, saw in mirrored.items()}
    saws |= {f"multi_worker {name}": saw for name, saw in multi_worker.items()}
    for name, reference in (("bfloat16", "sgd"), ("tied_bfloat16", "tied")):
        exact = single[reference]
        own = [saw for key, saw in saws.items() if key.split()[1][:-2] == name]
        assert len(own) == 2 + (name in ON_FOUR), "mirrored on two and four devices, multi_worker"
        allowed = 2 * loss_error(single[name], exact)
        assert all(loss_error(saw, exact) < allowed for saw in own)
        for prefix in ("gradient/", "state/"):
            allowed = 2 * overall_error(single[name], exact, prefix)
            assert 1e-4 < allowed < 0.2, "bfloat16 is really used, and works"
            for saw in own:
                assert overall_error(saw, exact, prefix) < allowed


@pytest.mark.distributed
def test_every_device_holds_a_replica_and_does_its_share(mirrored, multi_worker):
    for name, saw in mirrored.items():
        if name in FAULTS:
            continue
        num_devices = int(name[-1])
        devices = [f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in range(num_devices)]
        assert saw["variable_devices"].tolist() == devices
        # With microbatches they stand in a loop's body, inside the device's.
        if name.split("_")[0] in ("sgd", "tied", "overflow"):
            assert saw["product_devices"].tolist() == devices
            assert len(set(saw["products"])) == 1, "every device makes as many matrix products"
        assert saw["differences"].max() == 0, "replicas hold different values"
        assert saw["size"] == 1 and saw["in_flight"] > 0
    for name, saw in multi_worker.items():
        assert saw["size"] == 2 and saw["ranks"] == 11 and set(saw["signals"]) == {1}
        assert saw["num_collectives"] >= (1 if name == "missing_allreduce" else 2)
        assert saw["devices_of_rank"] == 2, "each process's variables are on its own device"
        if name not in FAULTS:
            assert saw["spread"] == 0, "ranks hold different weights"


@pytest.mark.distributed
def test_faults_are_found(mirrored, multi_worker, single):
    for saw in (mirrored, multi_worker):
        for fault in FAULTS:
            error, _ = largest_error(saw[fault], single["sgd"], "gradient/")
            assert error > (0.01 if fault == "local_sample_index" else 0.1), fault
            error, _ = largest_error(saw[fault], single["sgd"], "state/")
            assert error > 100 * TOLERANCE, fault


@pytest.mark.distributed
def test_an_overflow_on_one_rank_skips_the_update_on_all(mirrored, multi_worker):
    for result in (mirrored["overflow_2"], multi_worker["overflow_2"]):
        assert result["applied"].tolist() == [0, 0, 0]
        assert result["loss_scale"] == 256, "1024, halved twice before the third step"
        assert np.isfinite(result["losses"]).all()
