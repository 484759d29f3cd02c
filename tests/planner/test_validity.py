"""What `tfbig plan` accepts is what the trainers accept, and the other way round."""

import functools
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trainers
import trainers.horovod
import trainers.pipeline
from tfbig.config import Config, ModelConfig, replace_fields, to_dict
from tfbig.errors import UserError
from tfbig.planner.cluster import Cluster, load_constants, make_cluster
from tfbig.planner.layout import Request, check_devices, make_plan
from tfbig.planner.software import SOFTWARE
from tfbig.schedule import batch_sizes
from tfbig.validation import validate
from trainers.validate import derive_microbatch_size

MODEL = ModelConfig(vocab_size=64, max_length=16, embed_dim=16, num_layers=4, num_heads=4)
MOSTLY = {  # the first value is drawn most often
    "strategy": ("pipeline", "horovod", "pipeline", "single", "mirrored", "multi_worker", "nobody"),
    "pipeline_parallel_degree": (1, 2, 4, 8),
    "tensor_parallel_degree": (1, 2, 3, 4),
    "microbatches": (1, 2, 3, 8),
    "global_batch": (16, 32, 12, 1),
    "batch_warmup_start": (0, 4),
    "pipeline": ("1f1b", "simple", "interleaved"),
    "num_chunks": (2, 1, 3),
    "active_microbatches": (0, 1, 4),
    "partition": ("", "2,2", "3,2", "1,1,1,1", "x"),
    "placement_strategy": ("cluster", "spread", "TDP", "near"),
    "sequence_parallel": (False, True),
    "sequence_length": (16, 15, 17),
    "shard_optimizer_state": (False, True),
    "shard_gradients": (False, True),
    "shard_parameters": (False, True),
    "offload_optimizer_state": (False, True),
    "offload_activations": (False, True),
    "activation_checkpointing": ("none", "attention", "block", "group_2", "group_0", "all"),
    "gradient_reduction": ("auto", "tape", "buckets"),
    "bucket_megabytes": (32, 1, 0),
    "memory_weight": (0.5, 0.0, 2.0),
    "jit_compile": (False, True),
    "attention": ("auto", "plain", "blockwise", "plain_xla"),
    "precision": ("float32", "bfloat16", "float16"),
    "num_devices": (0, 1, 2),
    "lora_rank": (0, 2),
    "freeze": ((), ("embedding_layer",), ("transformer_blocks/0", "transformer_blocks/1"), ("no",)),
    "num_heads": (4, 3),
    "norm_order": ("pre", "post"),
    "optimizer": ("adamw", "sgd"),
    "ema_decay": (0.0, 0.9, 1.0),
    "label_smoothing": (0.0, 0.1, 1.5),
    "z_loss": (0.0, 1e-4, -1.0),
}
KNOWN = {name for section in to_dict(Config()).values() for name in section}


class World:
    """As many ranks as a test wants, of which this process is the first; nobody else is there."""

    world = None
    groups: tuple[Any, ...] = ()

    def __init__(self, size: int, *_: Any, **__: Any) -> None:
        self.rank = self.local_rank = 0
        self.size = self.local_size = size

    def differs(self, values: np.ndarray) -> np.ndarray:
        return np.zeros(len(values), bool)

    def gather(self, array: np.ndarray) -> np.ndarray:
        return np.repeat(array, self.size)

    def everyone(self, axis: str) -> None:
        return None

    def close(self) -> None:
        return None


@st.composite
def runs(draw: st.DrawFn) -> tuple[Config, int]:
    """Draws a configuration, some fields off their defaults, and a number of devices."""
    names = sorted(MOSTLY.keys() & KNOWN)
    changed = draw(st.lists(st.sampled_from(names), max_size=5, unique=True))
    values = {"strategy": draw(st.sampled_from(MOSTLY["strategy"])), "global_batch": 16}
    values |= {name: draw(st.sampled_from(MOSTLY[name])) for name in changed}
    if values.get("batch_warmup_start"):
        values["batch_warmup_samples"] = 32
    base = replace_fields(Config(model=MODEL), {"sequence_length": 16, "schedule": "constant"})
    return replace_fields(base, values), draw(st.sampled_from((1, 2, 4, 8)))


def accepts(action: Any) -> str:
    """Returns why an action refuses, "" where it doesn't."""
    try:
        action()
    except UserError as error:
        return str(error) or "?"
    return ""


def train_start(config: Config, cluster: Cluster, monkeypatch: Any) -> None:
    """Does what train does before it makes a variable, with the trainers' own constructors."""
    world = functools.partial(World, cluster.num_devices)
    monkeypatch.setattr(trainers.horovod, "Engine", world)
    monkeypatch.setattr(trainers.pipeline, "Engine", world)
    validate(config)
    replicas = cluster.num_devices
    trainer_of = trainers.trainer_class(config.parallel.strategy)
    if config.parallel.strategy in ("mirrored", "multi_worker"):
        trainers.check_strategy(config)  # TensorFlow makes their devices once a process
        check_devices(config, cluster)
    elif config.parallel.strategy == "single":
        check_devices(config, cluster)
        trainer_of(config)
    else:
        trainer = trainer_of(config)
        replicas = trainer.num_replicas
    for global_batch in batch_sizes(config.run):
        derive_microbatch_size(global_batch, replicas, config.parallel.microbatches)


@settings(
    max_examples=400,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(runs())
def test_plan_accepts_what_trainers_accept_and_no_other(monkeypatch, run):
    config, count = run
    constants = load_constants()
    cluster = make_cluster(f"a100-80:{count}", constants)
    request = Request(config, cluster, SOFTWARE["tfbig"], 1e9, constants)
    planned = accepts(lambda: make_plan(request))
    trained = accepts(lambda: train_start(config, cluster, monkeypatch))
    assert bool(planned) == bool(trained), (planned, trained)


def test_the_draws_hold_both_kinds(monkeypatch):
    constants = load_constants()
    cluster = make_cluster("a100-80:4", constants)
    good = {"strategy": "pipeline", "pipeline_parallel_degree": 2, "sequence_length": 16}
    bad = (
        {"partition": "3,2"},
        {"shard_gradients": True},
        {"freeze": ("*",)},
        {"num_devices": 2},
        {"global_batch": 17},
    )
    tuned = (
        {"freeze": ("embedding_layer", "transformer_blocks/0", "transformer_blocks/1")},
        {"lora_rank": 2, "shard_optimizer_state": True},
    )
    for fields, is_good in [*((one, True) for one in ({}, *tuned)), *((one, False) for one in bad)]:
        config = replace_fields(Config(model=MODEL), good | fields)
        request = Request(config, cluster, SOFTWARE["tfbig"], 1e9, constants)
        starts = (
            functools.partial(make_plan, request),
            functools.partial(train_start, config, cluster, monkeypatch),
        )
        for start in starts:
            assert (accepts(start) == "") == is_good, (fields, accepts(start))
