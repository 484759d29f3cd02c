"""The variables that trainers make take the bytes that trainers/state_bytes.py says they do."""

import json

import pytest

from tests.distributed.launch import horovodrun
from tfbig.config import Config, ModelConfig, replace_fields
from tfbig.planner.memory import predict_memory
from trainers.state_bytes import own_state, stage_counts

WORKER = "tests/distributed/state_worker.py"
MODEL = {"vocab_size": 256, "max_length": 16, "embed_dim": 64, "num_layers": 1, "num_heads": 4}
FIELDS = {"sequence_length": 16, "global_batch": 4, "num_threads": 1, "bucket_megabytes": 1}
LEVELS: tuple[dict, ...] = (
    {},
    {"shard_optimizer_state": True},
    {"shard_gradients": True},
    {"shard_parameters": True},
)
CASES = {
    f"{strategy} {level} {precision}": (
        {"strategy": strategy, "precision": precision, **LEVELS[level]},
        {},
    )
    for strategy, level, precision in (
        *(("horovod", level, dtype) for level in range(4) for dtype in ("float32", "bfloat16")),
        ("pipeline", 0, "float32"),
        ("pipeline", 1, "bfloat16"),
        ("pipeline", 3, "bfloat16"),
    )
}
CASES |= {
    "average": ({"strategy": "horovod", "ema_decay": 0.9, **LEVELS[3]}, {}),
    "sgd": ({"strategy": "horovod", "optimizer": "sgd", "precision": "bfloat16", **LEVELS[1]}, {}),
    "adapters": ({"strategy": "horovod", "precision": "bfloat16"}, {"lora_rank": 4}),
    "frozen": ({"strategy": "horovod", "freeze": ["transformer_blocks/0"]}, {"num_layers": 2}),
    "tensor": ({"strategy": "pipeline", "tensor_parallel_degree": 2}, {"vocab_size": 250}),
    "stages": (
        {"strategy": "pipeline", "pipeline_parallel_degree": 2, "precision": "bfloat16"},
        {"tied_head": False, "num_layers": 2},
    ),
}


def config_of(name: str) -> Config:
    fields, model = CASES[name]
    return replace_fields(Config(model=ModelConfig(**MODEL | model)), FIELDS | fields)


def expected(config: Config, data_size: int, place: int) -> float:
    """Returns weights, optimizer's state and what gradients are added up in, as predicted."""
    parallel = config.parallel
    rank = predict_memory(config, data_size)[place]
    state, ranks = own_state(config), parallel.pipeline_parallel_degree
    layers = config.model.num_layers // ranks
    blocks = (layers * place, layers * (place + 1))
    counts = stage_counts(config, blocks, place == 0, place == ranks - 1)
    total = rank.weights + rank.optimizer
    if parallel.sharding_level == 0 and parallel.precision != "float32":
        # Copies in the compute dtype are tensors, not variables; only a mesh keeps trained ones'.
        total -= 2 * counts.frozen_narrow
        total -= 2 * counts.narrow if parallel.strategy == "pipeline" else 0
    if parallel.strategy == "pipeline" and parallel.sharding_level < 2:
        total += state.gradient * counts.trained
    return total


@pytest.mark.distributed
def test_the_variables_of_every_mode_take_what_is_predicted(tmp_path):
    cases = [
        {"name": name, "fields": FIELDS | fields, "model": MODEL | model}
        for name, (fields, model) in CASES.items()
    ]
    done = horovodrun(2, [WORKER, str(tmp_path), json.dumps(cases)], 600)
    assert done.returncode == 0, done.stdout
    wrong = {}
    for name in CASES:
        for rank in range(2):
            saw = json.loads((tmp_path / f"{name}_{rank}.json").read_text())
            place = rank if name == "stages" else 0
            ratio = saw["bytes"] / expected(config_of(name), saw["data_size"], place)
            if abs(ratio - 1) > 0.01:
                wrong[name, rank] = round(ratio, 3)
    assert not wrong
