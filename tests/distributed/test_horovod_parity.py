"""Horovod trains what one device trains: real processes, both reductions, faults that are found."""

import numpy as np
import pytest

from tests.distributed.parity import Saw, largest_error, loss_error, overall_error, run_cases

TOLERANCE = 1e-5
# No clipping: a gradient that is clipped to a norm hides a wrong scale.
SGD = {"optimizer": "sgd", "learning_rate": 0.1, "clip_norm": 0.0, "weight_decay": 0.01}
CLIPPED = {**SGD, "clip_norm": 0.5}
TERMS = {"z_loss": 1e-3, "label_smoothing": 0.1}
ADAMW = {"optimizer": "adamw", "learning_rate": 3e-3, **TERMS}
DROPOUT = {"dropout": 0.2, "attention_dropout": 0.1, "embedding_dropout": 0.1}
FLOAT16 = {"precision": "float16", "initial_loss_scale": 1024.0}
UNTIED = {"tied_head": False}
TAPE = {"strategy": "horovod", "gradient_reduction": "tape"}
# One megabyte holds the tiny model's gradients in one bucket; a bucket of 0 is not allowed, so
# the wide model's are spread over several.
BUCKETS = {"strategy": "horovod", "gradient_reduction": "buckets", "bucket_megabytes": 1}
WIDE = {"embed_dim": 256, "num_heads": 4}
CASES = {
    # name: (fields beside strategy's, model, strategies under horovodrun)
    "sgd": (SGD, {}, {"tape": TAPE, "buckets": BUCKETS}),
    "adamw": (ADAMW, UNTIED, {"tape": TAPE, "buckets": BUCKETS}),
    "wide": (SGD, WIDE, {"buckets": BUCKETS}),
    "accumulated": (
        {**CLIPPED, "ema_decay": 0.5, "layer_grad_norms": True},
        DROPOUT,
        {"buckets": {"strategy": "horovod", "microbatches": 2, "jit_compile": True}},
    ),
    "float16": ({**SGD, **FLOAT16}, {}, {"buckets": BUCKETS}),
    "bfloat16": (
        {**SGD, "precision": "bfloat16"},
        UNTIED,
        {"tape": TAPE, "buckets": {**BUCKETS, "microbatches": 2}},
    ),
    "untied": (SGD, UNTIED, {}),  # what bfloat16 errs from
}
SIXTEEN_BITS = ("float16", "bfloat16")
ALSO_ON_3 = ("sgd", "adamw")
FAULTS = ("missing_allreduce", "mean_of_means")


def reference_cases() -> list[dict]:
    return [
        {"name": name, "fields": {"strategy": "single", **fields}, "model": model}
        for name, (fields, model, _) in CASES.items()
    ]


def horovod_cases(num_processes: int) -> list[dict]:
    cases = [
        {"name": f"{name}_{kind}", "fields": {**fields, **extra}, "model": model}
        for name, (fields, model, kinds) in CASES.items()
        for kind, extra in kinds.items()
        if num_processes == 2 or name in ALSO_ON_3
    ]
    if num_processes == 2:
        cases += [{"name": fault, "fields": {**SGD, **BUCKETS}, "break": fault} for fault in FAULTS]
        cases += [
            {
                "name": f"overflow_{kind}",
                "fields": {**SGD, **FLOAT16, **reduction},
                "break": "overflow_on_last_replica",
                "brief": True,
            }
            for kind, reduction in (("tape", TAPE), ("buckets", BUCKETS))
        ]
    return cases


@pytest.fixture(scope="module")
def saw(tmp_path_factory) -> dict[tuple[int, str], Saw]:
    """What rank 0 saw, by (number of processes, case); 1 is `single`."""
    results = {}
    launches = {1: reference_cases(), 2: horovod_cases(2), 3: horovod_cases(3)}
    for num_processes, cases in launches.items():
        folder = tmp_path_factory.mktemp(f"world{num_processes}")
        found = run_cases(folder, num_processes, cases, 600)
        results |= {(num_processes, name): value for name, value in found.items()}
    return results


@pytest.mark.distributed
@pytest.mark.parametrize(
    "num_processes, name, kind",
    [(2, n, k) for n, (_, _, kinds) in CASES.items() for k in kinds if n not in SIXTEEN_BITS]
    + [(3, n, k) for n in ALSO_ON_3 for k in CASES[n][2]],
)
def test_horovod_equals_single(saw, num_processes, name, kind):
    result, reference = saw[num_processes, f"{name}_{kind}"], saw[1, name]
    np.testing.assert_allclose(result["losses"], reference["losses"], rtol=TOLERANCE)
    error, path = largest_error(result, reference, "gradient/")
    assert error < TOLERANCE, path
    if name != "adamw":  # under Adam, weights whose true gradient is zero drift by noise
        error, path = largest_error(result, reference, "state/")
        assert error < TOLERANCE, path
    for step in range(3):
        np.testing.assert_allclose(
            result[f"sources/{step}"], reference[f"sources/{step}"], rtol=TOLERANCE
        )
    np.testing.assert_allclose(result["evaluation"], reference["evaluation"], rtol=1e-4, atol=1e-4)
    if name == "accumulated":  # compiled there, with averages and norms by layer
        averaged = result["averaged_evaluation"]
        np.testing.assert_allclose(averaged, reference["averaged_evaluation"], rtol=1e-4, atol=1e-4)
        assert np.abs(averaged[0] - result["evaluation"][0]).max() > 1e-4, "an average of its own"
        norms = reference["layer_grad_norms"]
        assert norms.shape == (4,) and norms.min() > 0
        np.testing.assert_allclose(result["layer_grad_norms"], norms, rtol=1e-4)


@pytest.mark.distributed
def test_float16_takes_its_steps_and_errs_at_most_twice_as_much(saw):
    exact, alone, two = saw[1, "sgd"], saw[1, "float16"], saw[2, "float16_buckets"]
    assert alone["applied"].tolist() == [1] * 3 and two["applied"].tolist() == [2] * 3
    assert two["loss_scale"] == alone["loss_scale"] == 1024
    allowed = 2 * overall_error(alone, exact, "state/")
    assert 0 < allowed < 0.1, "float16 is really used, and works"
    assert overall_error(two, exact, "state/") < allowed


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["tape", "buckets"])
def test_bfloat16_errs_at_most_twice_as_much(saw, kind):
    exact, alone, two = saw[1, "untied"], saw[1, "bfloat16"], saw[2, f"bfloat16_{kind}"]
    for prefix in ("gradient/", "state/"):
        allowed = 2 * overall_error(alone, exact, prefix)
        assert 0 < allowed < 0.1, "bfloat16 is really used, and works"
        assert overall_error(two, exact, prefix) < allowed
    assert loss_error(alone, exact) > TOLERANCE
    assert loss_error(two, exact) <= 2 * loss_error(alone, exact)


@pytest.mark.distributed
@pytest.mark.parametrize("num_processes", [2, 3])
def test_all_processes_and_both_reductions_took_part(saw, num_processes):
    for (world, name), result in saw.items():
        if world != num_processes:
            continue
        assert result["size"] == num_processes
        assert result["ranks"] == sum(10**rank for rank in range(num_processes))
        assert set(result["signals"]) == {num_processes - 1}  # the largest signal any rank passed
        assert result["in_flight"] > 0
        if name in FAULTS:
            continue
        assert result["spread"] == 0, "ranks hold different weights"
        operations = set(result["operations"])
        assert ("HorovodGroupedAllreduce" in operations) is name.endswith("tape"), operations
        reduces = int(result["num_all_reduces"])
        expected = 1 if name.endswith("tape") else 2 if not name.startswith("wide") else 8
        assert reduces >= expected, (name, reduces)


@pytest.mark.distributed
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(saw, fault):
    result, reference = saw[2, fault], saw[1, "sgd"]
    error, _ = largest_error(result, reference, "gradient/")
    assert error > 0.1
    error, _ = largest_error(result, reference, "state/")
    assert error > 100 * TOLERANCE


@pytest.mark.distributed
def test_dropout_is_really_on(saw):
    first = [saw[1, name]["losses"][0] for name in ("accumulated", "sgd")]
    assert abs(first[0] - first[1]) > 1e-4 * first[1]


@pytest.mark.distributed
def test_an_overflow_on_one_rank_skips_the_update_on_all(saw):
    for result in (saw[2, "overflow_tape"], saw[2, "overflow_buckets"]):
        assert result["applied"].tolist() == [0, 0, 0]
        assert result["loss_scale"] == 256, "1024, halved twice before the third step"
        assert np.isfinite(result["losses"]).all()
