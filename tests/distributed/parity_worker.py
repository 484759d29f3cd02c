"""Runs training cases in one process of a launch and writes what rank 0 saw to a folder.

usage: parity_worker.py OUTPUT CASES_JSON

A case is {"name", "fields" (of Config), "model" (of ModelConfig), "init_from", "steps", "break",
"brief", "resume"}; "init_from" is a Hugging Face folder to begin with, "break" names a fault that
is put in on purpose, "brief" leaves evaluation and decoding out, "resume" are fields of a second
trainer that goes on from what the first one saved.
"""

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from tfbig.command import quiet_tensorflow

quiet_tensorflow()

import tensorflow as tf  # noqa: E402

import trainers  # noqa: E402
from tests.distributed.parity import TRUE_VOCABULARY  # noqa: E402
from tfbig.checkpoint_format import Slice  # noqa: E402
from tfbig.config import Config, ModelConfig, replace_fields  # noqa: E402
from tfbig.interop.hugging_face_folder import HuggingFaceFolder  # noqa: E402
from tfbig.model.initialization import initial_value  # noqa: E402
from trainers.collectives import Group  # noqa: E402
from trainers.gradients import microbatch  # noqa: E402
from trainers.replica import ReplicaTrainer  # noqa: E402
from trainers.sharded_optimizer import ShardedOptimizer  # noqa: E402

MODEL = {"vocab_size": 61, "max_length": 16, "embed_dim": 32, "num_layers": 2, "num_heads": 4}
# 4 replicas x 4 microbatches x 3 rows, and 3 replicas x 16.
GLOBAL_BATCH, LENGTH, NUM_SOURCES = 48, 16, 3
assert TRUE_VOCABULARY < MODEL["vocab_size"], "the rest pads the embedding"


def make_config(case: dict) -> Config:
    config = Config(model=ModelConfig(**(MODEL | case.get("model", {}))))
    fields = {
        "sequence_length": LENGTH,
        "global_batch": GLOBAL_BATCH,
        "warmup_steps": 0,
        "schedule": "constant",
    }
    return replace_fields(config, fields | case["fields"])


def global_batch(step: int) -> dict[str, np.ndarray]:
    """A batch with padded rows: valid tokens differ between rows, some rows have none."""
    random = np.random.default_rng(step)
    mask = np.arange(LENGTH) < random.integers(0, LENGTH + 1, (GLOBAL_BATCH, 1))
    mask[0] = False
    return {
        "tokens": random.integers(0, MODEL["vocab_size"], (GLOBAL_BATCH, LENGTH + 1), np.int32),
        "sample_index": np.arange(GLOBAL_BATCH, dtype=np.int64) + step * GLOBAL_BATCH,
        "source_index": random.integers(0, NUM_SOURCES, GLOBAL_BATCH).astype(np.int32),
        "loss_mask": mask.astype(np.uint8),
    }


def local_batch(trainer, step: int) -> dict[str, tf.Tensor]:
    rows = GLOBAL_BATCH // trainer.data_size
    rank = getattr(trainer, "fed_rank", trainer.data_rank)
    part = slice(rank * rows, (rank + 1) * rows)
    return {name: tf.constant(value[part]) for name, value in global_batch(step).items()}


def break_on_purpose(trainer, fault: str) -> None:
    """Puts a fault in that the comparison must find."""
    if fault == "missing_allreduce":
        trainer._gradients = lambda batch, step, clock: ReplicaTrainer._gradients(
            trainer, batch, step, clock
        )
    elif fault == "overflow_on_last_replica":
        overflow_on_last_replica(trainer)
    elif fault == "missing_scatter_sum":  # each rank takes its slice of its own gradients
        group = trainer._optimizer._group

        def own_slice(flat, name, clock=None):
            return tf.split(flat, group.size)[group.rank]

        group.reduce_scatter = own_slice
    elif fault == "same_rows":  # every replica takes the first one's
        trainer._part = lambda batch: microbatch(batch, 0, trainer.num_local)
        trainer.fed_rank = 0
    elif fault == "local_sample_index":  # dropout is keyed by the row of a replica, not of the run
        take = trainer._part

        def renumbered(batch):
            rows = take(batch)
            return rows | {"sample_index": tf.range(rows["tokens"].shape[0], dtype=tf.int64)}

        trainer._part = renumbered
    elif fault == "mean_of_means":
        plain = trainer._gradients

        def scaled(batch, step, clock):
            gradients, sums = plain(batch, step, clock)
            return {path: g / trainer.num_replicas for path, g in gradients.items()}, sums

        trainer._gradients = scaled
    elif fault:
        break_pipeline(trainer, fault)


def overflow_on_last_replica(trainer) -> None:
    """Makes the gradients of one replica infinite; its loss stays as it is."""
    pipeline = trainer.config.parallel.strategy == "pipeline"
    model = trainer._chunks[-1].model if pipeline else trainer.model
    plain = model.head_loss

    def head_loss(*arguments):
        loss_sum, *rows = plain(*arguments)
        context = tf.distribute.get_replica_context()
        replica = trainer.data_rank
        if context is not None and context.num_replicas_in_sync > 1:
            replica = context.replica_id_in_sync_group
        is_last = tf.equal(replica, trainer.num_replicas - 1)
        return loss_sum * tf.where(is_last, np.inf, 1.0), *rows

    model.head_loss = head_loss


def break_pipeline(trainer, fault: str) -> None:
    """Puts a fault into a pipeline trainer, before anything is traced."""
    chunks, groups = trainer._chunks, trainer._update._groups
    if fault == "wrong_loss_scale":
        for chunk in chunks:

            def scaled(index, upstream, plain=chunk.backward):
                return plain(index, tf.constant(0.5) if upstream is None else upstream)

            chunk.backward = scaled
    elif fault == "missing_tensor_allreduce":
        split = chunks[0].model.split
        plain = split._reduce

        def reduce(x, name):
            return tf.identity(x) if name.endswith("enter_gradient") else plain(x, name)

        split._reduce = reduce
    elif fault == "missing_tied_allreduce":
        trainer._update._groups = groups._replace(tied=None)
    elif fault == "missing_data_allreduce":
        alone = Group("data", [trainer.rank], None, trainer.rank)
        trainer._optimizer._group = alone
    elif fault == "swapped_shard":
        for path, shard in trainer._shards.items():
            if path.endswith("att/out/kernel"):
                size = shard.local_shape[0]
                start = size - shard.start[0]  # of two ranks, the other one's
                config, seed = trainer.config.model, trainer.config.run.seed
                value = initial_value(config, seed, path, shard.global_shape, start, size)
                trainer._chunks[0].variables[path].assign(value)
    else:
        raise ValueError(fault)


def run_case(case: dict, output: Path) -> dict[str, np.ndarray]:
    config = make_config(case)
    trainer = trainers.trainer_class(config.parallel.strategy)(config)
    trainer.build(num_sources=NUM_SOURCES, vocab_size=TRUE_VOCABULARY)
    if "init_from" in case:
        lacking = trainer.load_state(HuggingFaceFolder(case["init_from"]), weights_only=True)
        assert all("/lora_" in path for path in lacking), lacking
    break_on_purpose(trainer, case.get("break", ""))
    saw: dict[str, np.ndarray] = {"size": np.array(trainer.size)}

    gradients = gather(trainer, output, trainer.gradient_slices(local_batch(trainer, 0), 0))
    saw |= {f"gradient/{path}": value for path, value in gradients.items()}
    losses, signals, applied = [], [], []
    for step in range(case.get("steps", 3)):
        result = trainer.train_step(
            local_batch(trainer, step), step, config.optimizer.learning_rate, 0.0, trainer.rank % 3
        )
        losses.append(float(result.loss_sum / result.num_tokens))
        signals.append(int(result.signal))
        saw[f"sources/{step}"] = np.stack([result.source_loss_sum, result.source_num_tokens])
        applied.append(bool(result.applied))
    saw |= held(trainer)
    saw["losses"], saw["signals"] = np.array(losses), np.array(signals)
    assert all(applied) or case.get("break")
    # Seen of all ranks: how many of them applied each update.
    saw["applied"] = np.array([trainer.agree(int(one), "sum") for one in applied])
    state = gather(trainer, output, trainer.state_slices())
    saw |= {f"state/{path}": value for path, value in state.items()}
    if config.parallel.strategy != "pipeline":
        collectives = operations(trainer)
        saw["operations"] = np.array(sorted(set(collectives)) or ["none"])
        saw["num_all_reduces"] = np.array(collectives.count("HorovodAllreduce"))
        saw["spread"] = spread(trainer)
    else:
        saw["wire_dtypes"] = np.array(wire_dtypes(trainer) or ["none"])
    if config.parallel.strategy in ("mirrored", "multi_worker"):
        saw |= placement(trainer)
    timings = trainer.timings()()
    saw["in_flight"] = np.array(sum(timings.values()))
    saw["axes"] = np.array(sorted(timings) or ["none"])
    saw["loss_scale"] = np.array(result.loss_scale)
    saw["layer_grad_norms"] = np.array(result.layer_grad_norms)
    if not case.get("brief"):
        saw["evaluation"] = np.stack(trainer.evaluate_step(local_batch(trainer, 7)))
        saw["decoded"] = decode(trainer)
    if config.optimizer.ema_decay:
        averaged = trainer.evaluate_step(local_batch(trainer, 7), weights="ema")
        saw["averaged_evaluation"] = np.stack(averaged)
    saw["ranks"] = np.array(trainer.agree(10**trainer.rank, "sum"))
    trainer.barrier(60)
    if "resume" in case:
        saw["went_on"] = go_on(trainer, len(losses))
        trainer = resumed_trainer(trainer, case, state, output)
        saw["resumed"] = go_on(trainer, len(losses))
    if trainer.rank == 0:
        print(case["name"], dataclasses.asdict(config.parallel)["strategy"], losses, flush=True)
    trainer.close()
    return saw if trainer.rank == 0 else {}


class SavedState:
    """What `load_state` needs of a checkpoint, of one file."""

    def __init__(self, path: Path) -> None:
        self._values = dict(np.load(path))

    def has(self, path: str) -> bool:
        return path in self._values

    def read(self, path: str, start=None, shape=None) -> np.ndarray:
        value = self._values[path]
        if start is None:
            return value
        return value[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))]


def go_on(trainer, first: int) -> np.ndarray:
    """Returns the losses of three more steps."""
    rate, signal = trainer.config.optimizer.learning_rate, 0
    results = [
        trainer.train_step(local_batch(trainer, step), step, rate, 0.0, signal)
        for step in range(first, first + 3)
    ]
    return np.array([float(result.loss_sum / result.num_tokens) for result in results])


def resumed_trainer(trainer, case: dict, state: dict[str, np.ndarray], output: Path):
    """Returns a second trainer, in place of the first, that holds the state rank 0 gathered."""
    path = output / f"{case['name']}_state.npz"
    if trainer.rank == 0:
        np.savez(path, **state)
    trainer.barrier(60)
    trainer.close()
    config = make_config(case | {"fields": case["fields"] | case["resume"]})
    trainer = trainers.trainer_class(config.parallel.strategy)(config)
    trainer.build(num_sources=NUM_SOURCES)
    assert trainer.load_state(SavedState(path)) == []
    return trainer


def gather(trainer, folder: Path, slices: Iterable[Slice]) -> dict[str, np.ndarray]:
    """Returns, on rank 0, whole tensors; the writers' slices must tile each exactly once."""
    written, whole = {}, {}
    for part in slices:
        if part.is_writer:
            key = json.dumps([part.path, part.global_shape, part.start])
            written[key] = np.asarray(part.array)
    np.savez(folder / f"gather_{trainer.rank}.npz", **written)
    trainer.barrier(60)
    if trainer.rank == 0:
        times_written = {}
        for rank in range(trainer.size):
            with np.load(folder / f"gather_{rank}.npz") as file:
                for key in file:
                    path, shape, start = json.loads(key)
                    full = whole.setdefault(path, np.zeros(shape, file[key].dtype))
                    count = times_written.setdefault(path, np.zeros(shape, int))
                    part = tuple(
                        slice(first, first + length)
                        for first, length in zip(start, file[key].shape, strict=True)
                    )
                    full[part] = file[key]
                    count[part] += 1
        wrong = {path for path, count in times_written.items() if np.any(count != 1)}
        assert not wrong, f"not written exactly once: {wrong}"
    trainer.barrier(60)
    return whole


def train_graph(trainer):
    """Returns the graph of the training step."""
    return trainer._train.get_concrete_function(
        local_batch(trainer, 0),
        tf.TensorSpec([], tf.int64),
        tf.TensorSpec([], tf.float32),
        tf.TensorSpec([], tf.float32),
        tf.TensorSpec([], tf.int32),
    ).graph.as_graph_def()


def operations(trainer) -> list[str]:
    """Returns the kinds of the training step's collectives, those in branches included."""
    graph = train_graph(trainer)
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    return [node.op for node in nodes if node.op.startswith("Horovod")]


def wire_dtypes(trainer) -> list[str]:
    """Returns what the pipeline's hand-overs move, as Horovod's operations are given it."""
    return sorted(
        {
            operation.inputs[0].dtype.name
            for link in getattr(trainer._stepper, "_links", {}).values()  # none without stages
            for function in link._functions.values()
            for concrete in function._list_all_concrete_functions()
            for operation in concrete.graph.get_operations()
            if operation.type == "HorovodAlltoall"
        }
    )


def placement(trainer) -> dict[str, np.ndarray]:
    """Returns where variables are and where the step's matrix products run, by device."""
    graph = train_graph(trainer)
    products = Counter(node.device for node in graph.node if node.op == "MatMul")
    sums = Counter(node.op for node in graph.node if node.op == "CollectiveReduceV2")
    first_state = trainer._locals[0].state()
    names = [sorted({v.device for v in local.state().values()}) for local in trainer._locals]
    return {
        "devices_of_rank": np.array(trainer.agree(int(own_devices(trainer, names)), "sum")),
        "variable_devices": np.array([";".join(devices) for devices in names]),
        "product_devices": np.array(sorted(products)),
        "products": np.array([products[device] for device in sorted(products)]),
        "num_collectives": np.array(sum(sums.values())),
        "differences": np.array(
            [
                max(float(tf.reduce_max(tf.abs(v - other))) for v, other in pairs)
                for local in trainer._locals
                for pairs in [zip(local.state().values(), first_state.values(), strict=True)]
            ]
        ),
    }


def held(trainer) -> dict[str, np.ndarray]:
    """Returns the elements of slots and frozen weights that a rank holds, the least and the most.

    Of strategies whose ranks share state, for each moving average or slot.
    """
    optimizer = getattr(trainer, "_optimizer", None)
    if not isinstance(optimizer, ShardedOptimizer):
        return {}
    frozen = getattr(trainer, "_frozen", None)
    if frozen is not None:
        kept = frozen.parts
    elif hasattr(trainer, "_locals"):
        kept = trainer._locals[0].frozen.values()
    else:
        chunks = getattr(trainer, "_chunks", [])  # the units of a sharded mesh have none
        kept = [v for chunk in chunks for v in list(chunk.variables.values())[len(chunk.trained) :]]
    elements = {f"{prefix}slots": slots for prefix, slots in optimizer._rule.slots.items()}
    return {
        f"held_{name}": np.array(
            [trainer.agree(sum(int(tf.size(v)) for v in variables), op) for op in ("min", "max")]
        )
        for name, variables in (elements | {"frozen": kept}).items()
    }


def own_devices(trainer, names: list[list[str]]) -> bool:
    """Returns whether each replica's variables are on a device of its own, of this process."""
    process = "worker" if trainer.config.parallel.strategy == "multi_worker" else "localhost"
    expected = [
        [f"/job:{process}/replica:0/task:{trainer.rank}/device:CPU:{index}"]
        for index in range(trainer.num_local)
    ]
    return names == expected


def decode(trainer) -> np.ndarray:
    """Returns the logits after a prompt, and after rows were swapped, reset and went on."""
    tokens = np.random.default_rng(5).integers(0, MODEL["vocab_size"], (3, 4), np.int32)
    cache = trainer.new_cache(3, 8)
    nobody = np.zeros(3, bool)
    first, cache = trainer.decode_step(
        tokens, np.array([4, 2, 1], np.int32), np.arange(3, dtype=np.int32), nobody, cache
    )
    second, _ = trainer.decode_step(
        tokens[:, :2],
        np.array([1, 0, 2], np.int32),
        np.array([1, 0, 2], np.int32),
        np.array([False, False, True]),
        cache,
    )
    return np.stack([first, second])


def spread(trainer) -> np.ndarray:
    """Returns how far ranks differ in a sum over all weights, which must be nothing."""
    total = sum(float(tf.reduce_sum(tf.abs(v))) for v in trainer._variables.values())
    quantised = int(total * 1e4)
    return np.array(trainer.agree(quantised, "max") - trainer.agree(quantised, "min"))


def main() -> None:
    output, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    for case in cases:
        saw = run_case(case, output)
        if saw:
            np.savez(output / f"{case['name']}.npz", **saw)


if __name__ == "__main__":
    main()
