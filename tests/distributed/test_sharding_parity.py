"""Sharded state trains what one device trains: real processes, one launch a number of them."""

import numpy as np
import pytest

from tests.distributed.parity import Saw, largest_error, loss_error, overall_error, run_cases

TOLERANCE, ADAM_TOLERANCE = 1e-5, 1e-4
STEPS = 20
SGD = {"optimizer": "sgd", "learning_rate": 0.1, "clip_norm": 0.5, "weight_decay": 0.01}
TERMS = {"z_loss": 1e-3, "label_smoothing": 0.1}
ADAMW = {
    **TERMS,
    "optimizer": "adamw",
    "learning_rate": 3e-3,
    "ema_decay": 0.9,
    "layer_grad_norms": True,
}
DROPOUT = {"dropout": 0.2, "attention_dropout": 0.1, "embedding_dropout": 0.1}
BLOCK, GROUP = ({"activation_checkpointing": mode} for mode in ("block", "group_2"))
OFFLOADED_STATE, OFFLOADED_INPUTS = (
    {f"offload_{what}": True} for what in ("optimizer_state", "activations")
)
VARIANTS = {
    "sgd": (SGD, {"tied_head": True}),
    "adamw": (ADAMW, {"tied_head": False}),
    "bfloat16": ({**SGD, "precision": "bfloat16"}, {"tied_head": False}),
}
HOROVOD = {"strategy": "horovod"}
ZERO1, ZERO2, ZERO3 = (
    {**HOROVOD, flag: True}
    for flag in ("shard_optimizer_state", "shard_gradients", "shard_parameters")
)
MESH = {"strategy": "pipeline", "shard_optimizer_state": True, "microbatches": 2}
D2P2, D2T2 = ({**MESH, f"{axis}_parallel_degree": 2} for axis in ("pipeline", "tensor"))
FLOAT16 = {"precision": "float16", "initial_loss_scale": 1024.0}
# name: (variant, processes, fields)
CASES = {
    "zero1_sgd": ("sgd", 2, ZERO1),
    "zero1_adamw": ("adamw", 2, {**ZERO1, **BLOCK, "microbatches": 2}),
    "zero1_bfloat16": ("bfloat16", 2, ZERO1),
    "zero2_sgd": ("sgd", 2, ZERO2),
    "zero3_adamw": ("adamw", 2, {**ZERO3, "microbatches": 2}),
    "zero3_bfloat16": ("bfloat16", 2, {**ZERO3, **BLOCK}),
    "zero1_sgd_4": ("sgd", 4, ZERO1),
    "zero1_adamw_4": ("adamw", 4, {**ZERO1, **BLOCK, **OFFLOADED_STATE}),
    "zero1_d2p2": ("sgd", 4, {**D2P2, **BLOCK, **OFFLOADED_INPUTS}),
    "zero1_d2p2_bfloat16": ("bfloat16", 4, {**D2P2, **OFFLOADED_STATE}),
    "zero1_d2t2": ("adamw", 4, {**D2T2, **GROUP, "sequence_parallel": True}),
    "zero1_d2t2_sgd": ("sgd", 4, D2T2),
    "zero2_adamw_4": ("adamw", 4, {**ZERO2, **BLOCK, **OFFLOADED_INPUTS, "microbatches": 2}),
    "zero2_d2t2": ("sgd", 4, {**D2T2, **BLOCK, "shard_gradients": True}),
    "zero3_sgd_4": ("sgd", 4, {**ZERO3, **GROUP}),
    "zero3_adamw_4": ("adamw", 4, {**ZERO3, **OFFLOADED_STATE}),
    "zero3_d2t2": ("sgd", 4, {**D2T2, "shard_parameters": True, "sequence_parallel": True}),
}
BROKEN = {
    # name: (fault, processes, fields)
    "broken_zero1": ("missing_scatter_sum", 2, {**SGD, **ZERO1}),
    "broken_zero3": ("missing_scatter_sum", 2, {**SGD, **ZERO3}),
    "overflow_zero1": ("overflow_on_last_replica", 2, {**SGD, **FLOAT16, **ZERO1}),
}
RESUMED = {
    # name: (processes, fields, fields of the second trainer)
    "resumed_zero1": (2, ZERO1, {}),
    "resumed_zero3": (2, {**ZERO3, "precision": "bfloat16"}, {}),
    "resumed_zero2": (4, {**ZERO2, **BLOCK}, {}),
    "resumed_d2p2": (4, {**D2P2, **OFFLOADED_STATE}, {}),
    "moved_to_mesh": (4, ZERO2, {**D2T2, **BLOCK, "shard_parameters": True}),
}


# One run's largest error in bfloat16 is a matter of luck: that of `single` was 1.1e-5, 3.1e-5 and
# 2.0e-5 with seeds 0, 1 and 2, that of ZeRO-1 2.9e-5, 2.8e-5 and 1.4e-5. Errors are those of all.
MORE_SEEDS = (1, 2)


def with_more_seeds(cases: list[dict], names: set[str]) -> list[dict]:
    """Returns the cases, and those of the given names with other seeds besides."""
    more = [
        {**case, "name": f"{case['name']}_{seed}", "brief": True}
        | {"fields": {**case["fields"], "seed": seed}}
        for case in cases
        if case["name"] in names
        for seed in MORE_SEEDS
    ]
    return cases + more


def model_of(variant: str) -> dict:
    return {**DROPOUT, **VARIANTS[variant][1]}


def reference_cases() -> list[dict]:
    fields = {name: fields for name, (fields, _) in VARIANTS.items()}
    fields["float32"] = {**fields["bfloat16"], "precision": "float32"}
    cases = [
        {
            "name": name,
            "steps": STEPS,
            "fields": {"strategy": "single", **value},
            "model": model_of("bfloat16" if name == "float32" else name),
        }
        for name, value in fields.items()
    ]
    return with_more_seeds(cases, {"bfloat16", "float32"})


def sharded_cases(world: int) -> list[dict]:
    cases = [
        {
            "name": name,
            "steps": STEPS,
            "fields": {**VARIANTS[variant][0], **fields},
            "model": model_of(variant),
        }
        for name, (variant, processes, fields) in CASES.items()
        if processes == world
    ]
    cases = with_more_seeds(cases, set(of_variant("bfloat16")))
    cases += [
        {
            "name": name,
            "break": fault,
            "brief": True,
            "fields": fields,
            "model": model_of("sgd"),
        }
        for name, (fault, processes, fields) in BROKEN.items()
        if processes == world
    ]
    return cases + [  # the last ones: what is deterministic stays so in a process
        {
            "name": name,
            "brief": True,
            "fields": {**ADAMW, **fields, "deterministic": True},
            "resume": second,
            "model": model_of("adamw"),
        }
        for name, (processes, fields, second) in RESUMED.items()
        if processes == world
    ]


@pytest.fixture(scope="module")
def saw(tmp_path_factory) -> dict[str, Saw]:
    """What rank 0 saw of each case; references by variant."""
    results = {}
    for world, cases in {1: reference_cases(), 2: sharded_cases(2), 4: sharded_cases(4)}.items():
        results |= run_cases(tmp_path_factory.mktemp(f"world{world}"), world, cases, 1800)
    return results


def of_variant(*variants: str) -> list[str]:
    return [name for name, (variant, _, _) in CASES.items() if variant in variants]


@pytest.mark.distributed
@pytest.mark.parametrize("name", of_variant("sgd", "adamw"))
def test_equals_single(saw, name):
    variant, world, _ = CASES[name]
    result, reference = saw[name], saw[variant]
    assert result["size"] == world and result["ranks"] == sum(10**rank for rank in range(world))
    is_sgd = variant == "sgd"
    assert loss_error(result, reference) < (TOLERANCE if is_sgd else ADAM_TOLERANCE)
    # Under Adam, weights whose true gradient is zero drift by noise.
    for prefix in ("gradient/", "state/") if is_sgd else ("gradient/",):
        error, path = largest_error(result, reference, prefix)
        assert error < TOLERANCE, path
    for prefix in ("gradient/", "state/"):
        assert {p for p in result if p.startswith(prefix)} == {
            p for p in reference if p.startswith(prefix)
        }
    np.testing.assert_allclose(result["evaluation"], reference["evaluation"], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(result["decoded"], reference["decoded"], rtol=1e-2, atol=1e-3)


@pytest.mark.distributed
@pytest.mark.parametrize("name", of_variant("adamw"))
def test_slots_averages_and_norms_are_of_the_whole_model(saw, name):
    result, reference = saw[name], saw["adamw"]
    for prefix in ("state/optimizer/m/", "state/optimizer/v/", "state/ema/"):
        assert overall_error(result, reference, prefix) < 1e-3, prefix
    for field in ("averaged_evaluation", "layer_grad_norms"):
        np.testing.assert_allclose(result[field], reference[field], rtol=1e-3, atol=1e-3)


@pytest.mark.distributed
@pytest.mark.parametrize("name", of_variant("bfloat16"))
def test_bfloat16_is_as_exact_as_on_one_device(saw, name):
    result, bfloat16, float32 = saw[name], saw["bfloat16"], saw["float32"]
    # No gradient has been summed before the first loss.
    assert result["losses"][0] == pytest.approx(bfloat16["losses"][0], rel=1e-6)
    errors = {
        run: max(
            loss_error(saw[f"{run}{seed}"], saw[f"float32{seed}"])
            for seed in ("", *(f"_{seed}" for seed in MORE_SEEDS))
        )
        for run in (name, "bfloat16")
    }
    assert errors["bfloat16"] > TOLERANCE, "bfloat16 was not used"
    assert errors[name] <= 2 * errors["bfloat16"]
    for prefix in ("gradient/", "state/transformer_blocks"):
        error = overall_error(result, float32, prefix)
        assert error <= 2 * overall_error(bfloat16, float32, prefix), prefix
    # Saved are the exact values, which no 16 bits hold.
    weight = result["state/transformer_blocks/0/ffn/up/kernel"]
    assert weight.dtype == np.float32
    assert np.any(weight.view(np.uint32) & 0xFFFF)


@pytest.mark.distributed
@pytest.mark.parametrize("name", [n for n in BROKEN if n.startswith("broken")])
def test_a_missing_sum_is_found(saw, name):
    error, _ = largest_error(saw[name], saw["sgd"], "gradient/")
    assert error > 1000 * TOLERANCE


@pytest.mark.distributed
def test_an_overflow_on_one_rank_skips_the_update_on_all(saw):
    result = saw["overflow_zero1"]
    assert result["applied"].tolist() == [0, 0, 0]
    assert result["loss_scale"] == 256, "1024, halved twice before the third step"


@pytest.mark.distributed
@pytest.mark.parametrize("name", RESUMED)
def test_saved_state_goes_on(saw, name):
    result = saw[name]
    assert np.std(result["went_on"]) > 0
    if name.startswith("resumed"):
        np.testing.assert_array_equal(result["resumed"], result["went_on"])
    else:
        np.testing.assert_allclose(result["resumed"], result["went_on"], rtol=TOLERANCE)
        steps = len(result["losses"])
        np.testing.assert_allclose(
            result["losses"], saw["adamw"]["losses"][:steps], rtol=ADAM_TOLERANCE
        )
