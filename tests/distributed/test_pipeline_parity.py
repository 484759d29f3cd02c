"""Every mesh trains what one device trains: real processes, one launch for each number of them."""

import dataclasses

import numpy as np
import pytest

from tests.distributed.parity import Saw, largest_error, loss_error, overall_error, run_cases

TOLERANCE, ADAM_TOLERANCE = 1e-5, 1e-4
STEPS = 20
SGD = {"optimizer": "sgd", "learning_rate": 0.1, "clip_norm": 0.5, "weight_decay": 0.01}
ADAMW = {"optimizer": "adamw", "learning_rate": 3e-3}
DROPOUT = {"dropout": 0.2, "attention_dropout": 0.1, "embedding_dropout": 0.1}
BFLOAT16 = {"precision": "bfloat16"}
INTERLEAVED = {"pipeline": "interleaved", "num_chunks": 2}
SEQUENCE = {"sequence_parallel": True}
# Two or four tensor ranks pad this vocabulary, and the last two of four hold padding alone.
VOCABULARY = 201


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh under test."""

    name: str
    data: int
    pipeline: int
    tensor: int
    layers: int = 2
    fields: dict = dataclasses.field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.data * self.pipeline * self.tensor


LAYOUTS = [
    Layout("p2", 1, 2, 1),
    Layout("p2_interleaved", 1, 2, 1, 4, INTERLEAVED),
    Layout("t2", 1, 1, 2),
    Layout("t2_sequence", 1, 1, 2, 2, SEQUENCE),
    Layout("p4", 1, 4, 1, 4),
    Layout("t4", 1, 1, 4),
    Layout("p2t2", 1, 2, 2),
    Layout("d2p2", 2, 2, 1),
    Layout("d2t2", 2, 1, 2),
    Layout("d2p2t2", 2, 2, 2),
]
SPREAD = {"placement_strategy": "spread"}  # a rank's neighbours are replicas, not stages
# Other schedules, placements and chunks, each with SGD in float32; eight layers are two chunks of
# four ranks, which three microbatches do not fill.
SCHEDULES = [
    Layout("p2_simple", 1, 2, 1, 2, {"pipeline": "simple"}),
    Layout("p4_interleaved", 1, 4, 1, 8, INTERLEAVED),
    Layout("p4_capped", 1, 4, 1, 4, {"active_microbatches": 1}),
    Layout("d2p2_interleaved", 2, 2, 1, 4, INTERLEAVED),
    Layout("p2t2_interleaved", 1, 2, 2, 4, INTERLEAVED | SPREAD),
    Layout("d2p2t2_interleaved", 2, 2, 2, 4, INTERLEAVED | {"placement_strategy": "TPD"}),
    Layout("t4_untied", 1, 1, 4),
    Layout("d2t2_untied", 2, 1, 2, 2, SPREAD),
]
UNTIED = (SGD, {"tied_head": False}, 3)
# Each layout meets every pair of tied and untied, float32 and bfloat16, one and more microbatches.
VARIANTS = {
    "tied": (SGD, {"tied_head": True}, 3),
    "tied_bfloat16": (SGD | BFLOAT16, {"tied_head": True}, 1),
    "untied_bfloat16": (SGD | BFLOAT16, {"tied_head": False}, 2),
    "untied_adamw": (ADAMW, {"tied_head": False}, 1),
}
# Each on p2t2, which cuts every kind of layer.
MODELS = {
    "blog": (
        SGD,
        {
            "head_dim": 16,
            "feed_forward_dim": 48,
            "norm_order": "post",
            "norm_epsilon": 1e-6,
            "final_norm": False,
            "activation": "relu",
            "tied_head": False,
            "head_bias": True,
        },
    ),
    "neox": (
        SGD,
        {
            "position_embedding": "rotary",
            "rotary_fraction": 0.5,
            "parallel_residual": True,
            "activation": "gelu",
            "tied_head": False,
        },
    ),
    "terms": (SGD | {"z_loss": 1e-3, "label_smoothing": 0.1}, {"tied_head": False}),
    "averaged": (SGD | {"ema_decay": 0.9, "layer_grad_norms": True}, {}),
    "float16": (SGD | {"precision": "float16", "initial_loss_scale": 1024.0}, {}),
}
FAULTS = {
    # fault: the layout it is put into
    "wrong_loss_scale": "p2",
    "missing_tied_allreduce": "p2",
    "missing_tensor_allreduce": "t2",
    "swapped_shard": "t2",
    "missing_data_allreduce": "d2p2",
}


def reference_name(variant: str, layers: int, precision: str = "") -> str:
    return f"single_{variant}_{layers}{precision}"


def reference_cases() -> list[dict]:
    cases = []
    for layers in (2, 4):
        for variant, (fields, model, _) in VARIANTS.items():
            for precision in ("", "_float32") if "precision" in fields else ("",):
                cases.append(
                    {
                        "name": reference_name(variant, layers, precision),
                        "steps": STEPS,
                        "fields": {"strategy": "single", **fields}
                        | ({"precision": "float32"} if precision else {}),
                        "model": model_of(model, layers),
                        "brief": variant != "tied",
                    }
                )
    for layers in sorted({layout.layers for layout in SCHEDULES}):
        cases.append(untied_case(f"untied_{layers}", {"strategy": "single"}, layers))
    cases += [model_case(name, {"strategy": "single"}) for name in MODELS]
    return cases


def untied_case(name: str, layout: dict, layers: int) -> dict:
    fields, model, microbatches = UNTIED
    if layout["strategy"] != "single":
        layout = {**layout, "microbatches": microbatches}
    return {
        "name": name,
        "steps": STEPS,
        "fields": {**layout, **fields},
        "model": model_of(model, layers),
        "brief": True,
    }


def model_case(name: str, layout: dict) -> dict:
    fields, model = MODELS[name]
    return {
        "name": f"{'' if layout['strategy'] == 'single' else 'p2t2_'}{name}",
        "steps": STEPS,
        "fields": {**fields, **layout},
        "model": model_of(model, 2),
    }


def model_of(model: dict, layers: int) -> dict:
    return {"vocab_size": VOCABULARY, "num_layers": layers, **DROPOUT, **model}


def fields_of(layout: Layout) -> dict:
    return {
        "strategy": "pipeline",
        "pipeline_parallel_degree": layout.pipeline,
        "tensor_parallel_degree": layout.tensor,
        **layout.fields,
    }


def layout_cases(world: int) -> list[dict]:
    cases = []
    for layout in LAYOUTS:
        if layout.world != world:
            continue
        for variant, (fields, model, microbatches) in VARIANTS.items():
            cases.append(
                {
                    "name": f"{layout.name}_{variant}",
                    "steps": STEPS,
                    "fields": {**fields_of(layout), **fields, "microbatches": microbatches},
                    "model": model_of(model, layout.layers),
                    "brief": variant != "tied",
                }
            )
        for fault, broken in FAULTS.items():
            if broken == layout.name:
                cases.append(
                    {
                        "name": fault,
                        "steps": 3,
                        "break": fault,
                        "fields": {**fields_of(layout), **SGD, "microbatches": 2},
                        "model": model_of({"tied_head": True}, layout.layers),
                        "brief": True,
                    }
                )
        if layout.name == "d2p2":
            cases.append(
                {
                    "name": "overflow",
                    "break": "overflow_on_last_replica",
                    "fields": {**fields_of(layout), **MODELS["float16"][0], "microbatches": 2},
                    "model": model_of({}, 2),
                    "brief": True,
                }
            )
        if layout.name == "p2t2":
            cases += [model_case(name, fields_of(layout) | {"microbatches": 4}) for name in MODELS]
    here = [layout for layout in SCHEDULES if layout.world == world]
    return cases + [untied_case(one.name, fields_of(one), one.layers) for one in here]


@pytest.fixture(scope="module")
def references(tmp_path_factory) -> dict[str, Saw]:
    return run_cases(tmp_path_factory.mktemp("single"), 1, reference_cases(), 900)


@pytest.fixture(scope="module")
def saw(tmp_path_factory) -> dict[str, Saw]:
    results = {}
    for world in sorted({layout.world for layout in LAYOUTS}):
        folder = tmp_path_factory.mktemp(f"world{world}")
        results |= run_cases(folder, world, layout_cases(world), 1800)
    return results


def check_equal(result: Saw, reference: Saw) -> None:
    """Compares losses, first gradients, final state, evaluation and decoding."""
    assert loss_error(result, reference) < TOLERANCE
    for prefix in ("gradient/", "state/"):
        error, path = largest_error(result, reference, prefix)
        assert error < TOLERANCE, path
        assert {p for p in result if p.startswith(prefix)} == {
            p for p in reference if p.startswith(prefix)
        }
    np.testing.assert_allclose(result["evaluation"], reference["evaluation"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(result["decoded"], reference["decoded"], rtol=1e-3, atol=1e-4)


@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_equals_single_in_float32(saw, references, layout):
    result = saw[f"{layout.name}_tied"]
    reference = references[reference_name("tied", layout.layers)]
    assert result["size"] == layout.world and len(result["losses"]) == STEPS
    check_equal(result, reference)
    for step in range(STEPS):
        np.testing.assert_allclose(
            result[f"sources/{step}"], reference[f"sources/{step}"], rtol=TOLERANCE
        )


@pytest.mark.distributed
@pytest.mark.parametrize("layout", SCHEDULES, ids=lambda layout: layout.name)
def test_every_schedule_and_placement_equals_single(saw, references, layout):
    result, reference = saw[layout.name], references[f"untied_{layout.layers}"]
    assert result["size"] == layout.world and len(result["losses"]) == STEPS
    assert loss_error(result, reference) < TOLERANCE
    for prefix in ("gradient/", "state/"):
        error, path = largest_error(result, reference, prefix)
        assert error < TOLERANCE, path


@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_losses_equal_under_adamw(saw, references, layout):
    result = saw[f"{layout.name}_untied_adamw"]
    reference = references[reference_name("untied_adamw", layout.layers)]
    assert loss_error(result, reference) < ADAM_TOLERANCE
    error, path = largest_error(result, reference, "gradient/")
    assert error < TOLERANCE, path


@pytest.mark.distributed
@pytest.mark.parametrize("variant", ["tied_bfloat16", "untied_bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_bfloat16_is_as_exact_as_on_one_device(saw, references, layout, variant):
    result = saw[f"{layout.name}_{variant}"]
    bfloat16 = references[reference_name(variant, layout.layers)]
    float32 = references[reference_name(variant, layout.layers, "_float32")]
    assert loss_error(bfloat16, float32) > TOLERANCE, "bfloat16 was not used"
    assert loss_error(result, float32) <= 2 * loss_error(bfloat16, float32)
    for prefix in ("gradient/", "state/transformer_blocks"):
        error = overall_error(result, float32, prefix)
        assert error <= 2 * overall_error(bfloat16, float32, prefix), prefix


@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_hand_overs_move_the_compute_dtype(saw, layout):
    of_stages = {"tied": ["float32"], "tied_bfloat16": ["uint16"]}  # bfloat16 travels as its bits
    for variant, moved in of_stages.items():
        dtypes = list(saw[f"{layout.name}_{variant}"]["wire_dtypes"])
        assert dtypes == (moved if layout.pipeline > 1 else ["none"])


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["blog", "neox", "averaged", "terms"])
def test_every_kind_of_model_is_cut(saw, references, name):
    check_equal(saw[f"p2t2_{name}"], references[name])


@pytest.mark.distributed
def test_averages_and_norms_by_layer_are_of_the_whole_model(saw, references):
    result, reference = saw["p2t2_averaged"], references["averaged"]
    assert any(path.startswith("state/ema/") for path in reference)
    for name in ("averaged_evaluation", "layer_grad_norms"):
        np.testing.assert_allclose(result[name], reference[name], rtol=1e-4, atol=1e-4)
    assert not np.allclose(reference["averaged_evaluation"], reference["evaluation"], rtol=1e-3)


@pytest.mark.distributed
def test_float16_is_as_exact_as_on_one_device(saw, references):
    float32 = references[reference_name("tied", 2)]
    allowed = 2 * overall_error(references["float16"], float32, "state/transformer_blocks")
    assert 2e-6 < allowed < 0.1, "float16 was not used"
    assert overall_error(saw["p2t2_float16"], float32, "state/transformer_blocks") <= allowed
    assert saw["p2t2_float16"]["loss_scale"] == references["float16"]["loss_scale"] == 1024


@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_axis_and_rank_took_part(saw, layout):
    result = saw[f"{layout.name}_tied"]
    assert result["ranks"] == sum(10**rank for rank in range(layout.world))
    assert set(result["signals"]) == {min(2, layout.world - 1)}  # the largest any rank passed
    sizes = {"data": layout.data, "pipeline": layout.pipeline, "tensor": layout.tensor}
    assert {axis for axis, size in sizes.items() if size > 1} <= set(result["axes"])
    assert result["in_flight"] > 0


@pytest.mark.distributed
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(saw, references, fault):
    result = saw[fault]
    layers = next(layout.layers for layout in LAYOUTS if layout.name == FAULTS[fault])
    reference = references[reference_name("tied", layers)]
    error, _ = largest_error(result, reference, "gradient/")
    assert error > 1000 * TOLERANCE


@pytest.mark.distributed
def test_dropout_is_on(references):
    losses = references[reference_name("tied", 2)]["losses"]
    assert np.std(losses) > 0 and not np.allclose(
        losses, references[reference_name("untied_adamw", 2)]["losses"], rtol=1e-3
    )


@pytest.mark.distributed
def test_an_overflow_on_one_rank_skips_the_update_on_all(saw):
    for result in (saw["overflow"],):
        assert result["applied"].tolist() == [0, 0, 0]
        assert result["loss_scale"] == 256, "1024, halved twice before the third step"
        assert np.isfinite(result["losses"]).all()
