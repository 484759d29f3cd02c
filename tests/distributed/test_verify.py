"""--verify passes layouts that are right, and names what is wrong in ones that are not."""

import json

import pytest

from tests.distributed.launch import horovodrun
from tfbig.config import Config, replace_fields
from tfbig.verify import VerificationError, verify

HOROVOD = {"strategy": "horovod"}
STAGES = {"strategy": "pipeline", "pipeline_parallel_degree": 2, "microbatches": 2}
SHARDS = {"strategy": "pipeline", "tensor_parallel_degree": 2}
WHOLE = {
    "horovod": HOROVOD,
    "stages_bfloat16": STAGES | {"precision": "bfloat16"},
    "shards": SHARDS | {"sequence_parallel": True},
    "float16": HOROVOD | {"precision": "float16"},
    "frozen_stage": STAGES
    | {"freeze": ["embedding_layer", "transformer_blocks/0"], "tied_head": False},
}
FAULTS = {
    # fault: (layout, what the message must name)
    "missing_allreduce": (HOROVOD, "gradients"),
    "mean_of_means": (HOROVOD, "gradients"),
    "other_weights": (HOROVOD, "transformer_blocks/1/ffn/"),
    "local_sample_index": (HOROVOD, "gradients"),
    "lost_on_load": (HOROVOD, "next loss after save and load"),
    "no_clipping": (HOROVOD, "gradient norms"),
    "wrong_loss_scale": (STAGES, "gradients"),
    "missing_tied_allreduce": (STAGES, "embedding_layer/"),
    "missing_tensor_allreduce": (SHARDS, "gradients"),
    "swapped_shard": (SHARDS, "transformer_blocks/"),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> dict[str, str]:
    """What rank 0 was told of each case, all in one launch of two processes."""
    folder = tmp_path_factory.mktemp("verify")
    cases = [{"name": name, "fields": fields, "fault": ""} for name, fields in WHOLE.items()]
    cases += [
        {"name": fault, "fields": fields, "fault": fault} for fault, (fields, _) in FAULTS.items()
    ]
    arguments = ["tests/distributed/verify_worker.py", str(folder), json.dumps(cases)]
    done = horovodrun(2, arguments, timeout=1200)
    assert done.returncode == 0, done.stdout
    assert not list(folder.glob("*.verify")), "what verifying wrote is gone"
    return {case["name"]: (folder / f"{case['name']}.txt").read_text() for case in cases}


@pytest.mark.distributed
@pytest.mark.parametrize("name", WHOLE)
def test_a_layout_that_is_right_passes(told, name):
    lines = told[name].splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "losses",
        "gradients",
        "weights after SGD",
        "gradient norms",
        "next loss after save and load",
        "next gradient after save and load",
        "losses",
        "gradient norms",
    ]
    assert all(" <= " in line for line in lines)


@pytest.mark.distributed
@pytest.mark.parametrize("name", WHOLE)
def test_no_error_as_large_as_the_number_is_allowed(told, name):
    allowed = [float(line.partition(" <= ")[2].split()[0]) for line in told[name].splitlines()]
    assert max(allowed) < 0.1


@pytest.mark.distributed
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught_and_named(told, fault):
    assert told[fault].startswith("failed: ") and "EXCEEDS" in told[fault]
    assert FAULTS[fault][1] in told[fault]


def test_a_wrong_scale_of_float16s_gradients_is_caught(tmp_path):
    fields = {"strategy": "single", "precision": "float16", "run_dir": str(tmp_path / "run")}
    config = replace_fields(Config(), fields | {"global_batch": 8})

    def halve(trainer):
        plain = trainer._gradients

        def gradients(*arguments):
            found, sums = plain(*arguments)
            return {path: gradient / 2 for path, gradient in found.items()}, sums

        trainer._gradients = gradients

    with pytest.raises(VerificationError, match=r"gradients: 5\.0e-01 EXCEEDS"):
        verify(config, halve)
