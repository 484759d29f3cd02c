"""trainers.hvd, sdp and smp on real ranks: what the worker asserts, and losses across layouts."""

import sys

import numpy as np
import pytest

from tests.distributed.launch import horovodrun, run

WORKER = "tests/distributed/shims_worker.py"


@pytest.fixture(scope="module")
def saw(tmp_path_factory) -> dict[tuple[int, str], np.ndarray]:
    """The losses of each launch, by (ranks, "whole" or "cut")."""
    folder = tmp_path_factory.mktemp("shims")
    found = {}
    for world in (1, 2, 4):
        arguments = [WORKER, str(folder)]
        done = run([sys.executable, *arguments], 1200) if world == 1 else None
        done = done or horovodrun(world, arguments, 1500)
        assert done.returncode == 0, done.stdout
        with np.load(folder / f"saw_{world}.npz") as file:
            found |= {(world, name): file[name] for name in file.files}
    return found


@pytest.mark.distributed
def test_a_cut_model_trains_as_a_whole_one(saw):
    assert np.std(saw[1, "whole"]) > 0
    np.testing.assert_allclose(saw[2, "cut"], saw[1, "whole"], rtol=1e-5)


@pytest.mark.distributed
def test_replicas_of_a_cut_model_train_as_whole_ones(saw):
    assert not np.allclose(saw[2, "whole"], saw[1, "whole"], rtol=1e-3), "the same data"
    np.testing.assert_allclose(saw[4, "cut"], saw[2, "whole"], rtol=1e-5)
