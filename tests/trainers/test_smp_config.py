"""SageMaker's configuration names: each served, without effect, or refused with a reason."""

import json

import pytest

from tfbig.errors import UserError
from trainers import smp_config
from trainers.smp_config import ACCEPTED, REFUSED, WITHOUT_EFFECT, Parameters, read_parameters

# All that SageMaker's documentation and SDK name, and the launcher's own.
DOCUMENTED = """
partitions pipeline_parallel_degree microbatches pipeline optimize placement_strategy
auto_partition default_partition contiguous horovod load_partition partition_file memory_weight
ddp ddp_port ddp_dist_backend active_microbatches deterministic_server tensor_parallel_degree
shard_optimizer_state offload_activations activation_loading_horizon prescaled_batch fp16_params
fp16 skip_tracing sharded_data_parallel_degree sdp_reduce_bucket_size
sdp_param_persistence_threshold sdp_max_live_parameters sdp_hierarchical_allgather
sdp_gradient_clipping bf16 static_mode fast_mode delayed_parameter_initialization enabled
processes_per_host custom_mpi_options
""".split()
# Values other than the ones that change nothing.
VALUES = {"tensor_parallel_degree": 2, "sharded_data_parallel_degree": 2}


def test_every_documented_name_has_one_place():
    tables = [*ACCEPTED, *WITHOUT_EFFECT, *REFUSED]
    assert sorted(tables) == sorted(DOCUMENTED)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(name):
    unchanged, reason = REFUSED[name]
    assert read_parameters({name: unchanged}, 1) == Parameters()
    with pytest.raises(UserError, match=f"^smp parameter {name}=.* isn't served: ") as error:
        read_parameters({name: VALUES.get(name, True)}, 1)
    assert reason in str(error.value)


@pytest.mark.parametrize("name", sorted(set(WITHOUT_EFFECT) - {"optimize"}))
def test_what_has_no_effect_is_taken(name):
    assert read_parameters({name: 3}, 1) == Parameters()


def test_what_is_served_arrives():
    given = {
        "pipeline_parallel_degree": 2,
        "microbatches": 8,
        "pipeline": "simple",
        "placement_strategy": "spread",
        "auto_partition": False,
        "default_partition": 1,
        "ddp": True,
        "active_microbatches": 3,
    }
    found = read_parameters(given, 4)
    expected = Parameters(
        partitions=2,
        microbatches=8,
        pipeline="simple",
        placement_strategy="spread",
        auto_partition=False,
        default_partition=1,
        horovod=True,
        active_microbatches=3,
    )
    assert found == expected and found.schedule == "simple"
    assert read_parameters({"pipeline": "interleaved"}, 1).schedule == "1f1b"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"microbatch": 2}, "microbatch is not known. Did you mean microbatches"),
        ({"partitions": 0}, "partitions=0 must be at least 1"),
        ({"partitions": "2"}, "partitions='2' must be of type int"),
        ({"partitions": True}, "partitions=True must be of type int"),
        ({"partitions": 3}, "4 ranks are no multiple of the smp parameter partitions=3"),
        ({"partitions": 2}, "2 replicas whose gradients nobody would sum"),
        ({"partitions": 2, "pipeline_parallel_degree": 4}, "say two things"),
        ({"partitions": 4, "pipeline": "gpipe"}, "'gpipe' is not known: it is interleaved or"),
        ({"partitions": 4, "pipeline": "_only_forward"}, "runs forward only anyway"),
        ({"partitions": 4, "optimize": "size"}, "it is memory or speed"),
        ({"partitions": 4, "auto_partition": False}, "needs default_partition"),
        ({"partitions": 4, "default_partition": 4}, "must be from 0 to 3"),
    ],
)
def test_mistakes_are_named(given, words):
    with pytest.raises(UserError) as error:
        read_parameters(given, 4)
    assert words in str(error.value)


def test_the_launchers_parameters_go_first(monkeypatch):
    monkeypatch.setenv(smp_config.ENVIRONMENT, json.dumps({"microbatches": 4}))
    assert read_parameters({"microbatches": 2, "partitions": 2}, 2) == Parameters(
        microbatches=4, partitions=2
    )
    monkeypatch.setenv(smp_config.ENVIRONMENT, "[1]")
    with pytest.raises(UserError, match="is no JSON object"):
        read_parameters({}, 1)
