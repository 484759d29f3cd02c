"""What one layout saves, any other goes on from: losses as if nothing had happened."""

import itertools
import json
import sys

import numpy as np
import pytest

from tests.distributed.launch import horovodrun, run

WORKER = "tests/distributed/layouts_worker.py"
TOLERANCE = 1e-6  # measured: 2e-8; with a fresh optimizer 5e-5
HOROVOD, MESH = {"strategy": "horovod"}, {"strategy": "pipeline", "microbatches": 2}
PIPELINE, TENSOR = {"pipeline_parallel_degree": 2}, {"tensor_parallel_degree": 2}
# By number of processes; on one, the strategy that makes several devices comes first.
LAYOUTS = {
    1: {
        "mirrored2": {"strategy": "mirrored", "num_devices": 2},
        "single": {"strategy": "single"},
    },
    4: {"p2t2": {**MESH, **PIPELINE, **TENSOR}, "d2p2": {**MESH, **PIPELINE}},
    2: {
        "horovod2": HOROVOD,
        "p2": {**MESH, **PIPELINE},
        "t2": {**MESH, **TENSOR},
        "zero1": {**HOROVOD, "shard_optimizer_state": True},
        "zero2": {**HOROVOD, "shard_gradients": True},
        "zero3": {**HOROVOD, "shard_parameters": True},
    },
    3: {"horovod3": HOROVOD},
}
# One run whose layout changes three times.
CHAIN = {1: "single", 4: "d2p2", 2: "zero3", 3: "horovod3"}
NAMES = [name for layouts in LAYOUTS.values() for name in layouts]


def launch(folder, world: int, saves: bool) -> None:
    job = {"layouts": LAYOUTS[world], "saves": saves, "chain": CHAIN[world] if saves else ""}
    arguments = [WORKER, str(folder), json.dumps(job)]
    done = run([sys.executable, *arguments], 1200) if world == 1 else None
    done = done or horovodrun(world, arguments, 1500)
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def saw(tmp_path_factory) -> dict[str, dict[str, np.ndarray]]:
    """What each layout saw; "again_single" and "again_mirrored2" came back at the end."""
    folder = tmp_path_factory.mktemp("layouts")
    for world in LAYOUTS:
        launch(folder, world, saves=True)
    launch(folder, 1, saves=False)
    found = {}
    for path in folder.glob("*.npz"):
        with np.load(path) as file:
            found[path.stem.removeprefix("saves_")] = dict(file)
    return found


def pairs() -> list[tuple[str, str]]:
    """Returns (saved, resumed): each launch resumes what it and those before it have saved."""
    before = list(itertools.accumulate((list(x) for x in LAYOUTS.values()), list.__add__))
    return [
        (source, name)
        for layouts, saved in zip(LAYOUTS.values(), before, strict=True)
        for place, name in enumerate(layouts)
        # Of its own launch, a layout finds those that came before it.
        for source in saved[: len(saved) - len(layouts) + place + 1]
    ] + [(source, f"again_{name}") for source in NAMES for name in LAYOUTS[1]]


def test_the_matrix_is_wide_enough():
    different = {pair for pair in pairs() if pair[0] != pair[1].removeprefix("again_")}
    assert len(different) >= 24
    assert {source for source, _ in different} == set(NAMES)
    assert {name for _, name in different} >= set(NAMES) - set(LAYOUTS[1])


@pytest.mark.distributed
@pytest.mark.parametrize(("source", "name"), pairs())
def test_losses_go_on_as_undisturbed(saw, source, name):
    expected = saw["single"]["undisturbed"]
    np.testing.assert_allclose(saw[name][f"from_{source}"], expected, rtol=TOLERANCE)
    np.testing.assert_allclose(saw[source]["undisturbed"], expected, rtol=TOLERANCE)


@pytest.mark.distributed
def test_without_the_optimizers_state_they_would_not(saw):
    error = saw["again_single"]["weights_only"][-1] / saw["single"]["undisturbed"][-1] - 1
    assert abs(error) > 10 * TOLERANCE


@pytest.mark.distributed
def test_one_run_changes_its_layout_three_times(saw):
    chain = np.concatenate([saw[name]["chain"] for name in CHAIN.values()])
    begun = [*saw["single"]["begun"], *saw["single"]["undisturbed"]]
    np.testing.assert_allclose(chain[:5], begun, rtol=TOLERANCE)
    whole = saw["again_single"]["whole"]
    assert len(chain) == len(whole) == 8
    np.testing.assert_allclose(chain, whole, rtol=TOLERANCE)
