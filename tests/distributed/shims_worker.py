"""Calls of trainers.hvd, sdp and smp on real ranks; asserts what each rank gets.

usage: shims_worker.py FOLDER
"""

import os
import sys

import numpy as np
import pytest

from tfbig.command import quiet_tensorflow

quiet_tensorflow()

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402

from tfbig.errors import UserError  # noqa: E402
from trainers import hvd, sdp, smp  # noqa: E402
from trainers.script_session import session  # noqa: E402

WIDTH, CLASSES, ROWS = 8, 3, 8


def check_hvd() -> None:
    hvd.init()
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    ones = tf.constant([1.0, 2.0]) * (rank + 1)
    total = size * (size + 1) / 2
    np.testing.assert_allclose(hvd.allreduce(ones), np.array([1, 2]) * total / size)
    np.testing.assert_allclose(hvd.allreduce(ones, op=hvd.Sum), np.array([1, 2]) * total)
    np.testing.assert_allclose(hvd.allreduce(ones, average=False), np.array([1, 2]) * total)
    np.testing.assert_allclose(hvd.allreduce(ones, op=hvd.Max, name="m"), [size, 2 * size])
    np.testing.assert_allclose(
        hvd.allreduce(ones, compression=hvd.Compression.fp16, op=hvd.Sum), np.array([1, 2]) * total
    )
    doubled = hvd.allreduce(ones, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    np.testing.assert_allclose(doubled, np.array([2, 4]) * total)
    rows = tf.range(size, dtype=tf.float32) * (rank + 1)
    np.testing.assert_allclose(hvd.reducescatter(rows, op=hvd.Sum), [rank * total])
    np.testing.assert_allclose(hvd.reducescatter(rows), [rank * total / size])
    halved = {"prescale_factor": 0.5, "compression": hvd.Compression.fp16}
    np.testing.assert_allclose(
        hvd.reducescatter(rows, op=hvd.Sum, postscale_factor=4.0, **halved), [2 * rank * total]
    )
    check_grouped(rank, size)
    check_exchanges(rank, size)
    check_facts(rank, size)
    check_refused_calls(ones, size)
    check_objects(rank, size)
    check_variables(rank, size)
    check_gradients(rank, size)
    hvd.barrier()
    hvd.shutdown()
    with pytest.raises(UserError, match=r"shutdown\(\) was called"):
        hvd.rank()


def check_refused_calls(ones: tf.Tensor, size: int) -> None:
    for refused in (
        lambda: hvd.allreduce(ones, process_set=[0]),
        lambda: hvd.reducescatter(tf.zeros([size + 1])),
        lambda: hvd.allgather(ones, process_set=[0]),
        lambda: hvd.grouped_allreduce([ones], op=hvd.Max),
        lambda: hvd.grouped_allreduce([ones], average=True, op=hvd.Sum),
        lambda: hvd.alltoall(tf.zeros([size + 1])),
        lambda: hvd.size_op(process_set_id=1),
        lambda: hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Max),
        lambda: hvd.DistributedGradientTape(tf.GradientTape(), scale_local_gradients=True),
    ):
        with pytest.raises(UserError):
            refused()
    with pytest.raises(AttributeError, match=r"hvd.join isn't served; instead: give every rank"):
        hvd.join()


def check_objects(rank: int, size: int) -> None:
    gathered = hvd.allgather(tf.fill([rank + 1, 1], rank)).numpy()[:, 0]
    np.testing.assert_array_equal(gathered, np.repeat(np.arange(size), np.arange(size) + 1))
    thing = {"rank": rank, "array": np.arange(3), "pair": (1, "x", None)}
    found = hvd.broadcast_object(thing, root_rank=size - 1)
    assert found["rank"] == size - 1 and found["pair"] == (1, "x", None)
    np.testing.assert_array_equal(found["array"], np.arange(3))
    assert hvd.broadcast_object_fn(root_rank=size - 1)(rank) == size - 1
    assert hvd.allgather_object(rank) == list(range(size))


def check_variables(rank: int, size: int) -> None:
    """Both kinds of variables, in and out of a tf.function."""
    kept = [keras.Variable(np.full(3, rank, np.float32)), tf.Variable([float(rank)])]
    hvd.broadcast_variables(kept, root_rank=size - 1)
    np.testing.assert_array_equal(kept[0].numpy(), np.full(3, size - 1))
    kept[1].assign([float(rank)])
    tf.function(lambda: hvd.broadcast_variables(kept, root_rank=0, inplace=True))()
    np.testing.assert_array_equal(kept[1].numpy(), [0])
    kept[1].assign([float(rank)])
    (value,) = hvd.broadcast_(kept[1:], root_rank=size - 1)
    np.testing.assert_array_equal([value, kept[1].numpy()], [[size - 1]] * 2)


def check_gradients(rank: int, size: int) -> None:
    """A tape, in and out of a tf.function; a table's gradient becomes dense."""
    table, unused = tf.Variable(tf.zeros([4, 2])), tf.Variable(1.0)

    def gradient() -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [rank, rank]))
        return hvd.DistributedGradientTape(tape).gradient(loss, [table, unused])

    expected = np.zeros([4, 2])
    expected[:size] = 2 / size
    for run in (gradient, tf.function(gradient)):
        dense, nothing = run()
        np.testing.assert_allclose(dense, expected)
        assert nothing is None

    # An optimizer: Keras 3's, which stock Horovod reduces nothing for.
    weight = keras.Variable(np.zeros(2, np.float32))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum)
    optimizer.apply_gradients([(tf.constant([1.0, 0.0]) * (rank + 1), weight)])
    np.testing.assert_allclose(weight.numpy(), [-size * (size + 1) / 2, 0])
    assert len(optimizer.variables()) == len(optimizer.variables) > 0


def check_grouped(rank: int, size: int) -> None:
    total = size * (size + 1) / 2
    pair = [tf.constant([1.0, 2.0]) * (rank + 1), tf.constant([[rank + 1]])]
    summed = hvd.grouped_allreduce(
        pair, average=False, compression=hvd.Compression.fp16, ignore_name_scope=True
    )
    assert [tensor.dtype for tensor in summed] == [tf.float32, tf.int32]
    np.testing.assert_allclose(summed[0], np.array([1, 2]) * total)
    np.testing.assert_array_equal(summed[1], [[total]])
    (mean,) = hvd.grouped_allreduce(pair[:1], prescale_factor=0.5, postscale_factor=4.0)
    np.testing.assert_allclose(mean, np.array([2, 4]) * total / size)


def check_exchanges(rank: int, size: int) -> None:
    """Equal shares give rows alone; rank r sends r + 1 rows to the last rank, none to others."""
    shares = tf.range(2 * size) + 100 * rank
    expected = [100 * other + 2 * rank + row for other in range(size) for row in (0, 1)]
    np.testing.assert_array_equal(hvd.alltoall(shares), expected)
    splits = [0] * (size - 1) + [rank + 1]
    rows = tf.fill([rank + 1, 2], tf.cast(rank, tf.bfloat16))
    is_last = rank == size - 1
    counts = np.arange(1, size + 1) if is_last else np.zeros(size)
    for run in (hvd.alltoall, tf.function(hvd.alltoall)):
        found, received = run(rows, tf.constant(splits) if run is hvd.alltoall else splits)
        np.testing.assert_array_equal(received, counts)
        assert found.dtype == tf.bfloat16 and found.shape[1] == 2
        senders = np.repeat(np.arange(size), counts.astype(int))
        np.testing.assert_array_equal(tf.cast(found[:, 0], tf.int32), senders)


def check_facts(rank: int, size: int) -> None:
    import horovod.tensorflow as stock

    kinds = "mpi gloo nccl cuda rocm ddl ccl".split()
    for name in [*(f"{kind}_built" for kind in kinds), "mpi_enabled", "gloo_enabled"]:
        assert getattr(hvd, name)() == getattr(stock, name)(), name
    assert hvd.gloo_enabled() != hvd.mpi_enabled() >= hvd.mpi_threads_supported()
    assert hvd.is_homogeneous()
    numbers = tf.function(
        lambda: (hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op(name="n"))
    )
    assert [int(number) for number in numbers()] == [rank, size, rank, size]
    assert int(hvd.process_set_included_op()) == 1


def check_sdp() -> None:
    sdp.init()
    with pytest.raises(UserError, match="before: call it once"):
        sdp.init()
    rank, size = sdp.rank(), sdp.size()
    mean = (size + 1) / 2
    assert float(sdp.allreduce(tf.constant(rank + 1.0), param_index=0, num_params=1)) == mean
    assert float(sdp.oob_allreduce(tf.constant(rank + 1.0))) == mean
    assert int(sdp.broadcast(tf.constant(rank), root_rank=1)) == 1
    for refused in (
        lambda: sdp.oob_allreduce(tf.constant(1.0), op=sdp.ReduceOp.SUM),
        lambda: sdp.broadcast_global_variables(0),
        lambda: sdp.BroadcastGlobalVariablesHook(0),
        lambda: sdp.DistributedGradientTape(tf.GradientTape(), device_dense="gpu"),
    ):
        with pytest.raises(UserError):
            refused()
    variable = tf.Variable(2.0)
    with tf.GradientTape() as tape:
        loss = variable * (rank + 1.0)
    assert float(sdp.DistributedGradientTape(tape).gradient(loss, variable)) == mean
    sdp.shutdown()


class Net(smp.DistributedModel):
    """Blocks of any layers, under the other names; BatchNorm's averages are side effects."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.embed = keras.layers.Dense(WIDTH)
        self.blocks = [
            keras.Sequential(
                [keras.layers.Dense(WIDTH, activation="tanh"), keras.layers.BatchNormalization()]
            )
            for _ in range(num_blocks)
        ]
        self.head = keras.layers.Dense(CLASSES)

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        x = self.embed(x)
        for index, block in enumerate(self.blocks):
            with smp.partition(0 if index == 0 else 1):
                x = block(x, training=training)
        return self.head(x)


def rows() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(smp.dp_rank())
    return random.normal(size=(ROWS, 5)).astype(np.float32), random.integers(0, CLASSES, ROWS)


def make_step(model: Net, use_tape: bool):
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.1)

    @smp.step
    def run(x, y):
        if use_tape:
            with tf.GradientTape() as tape:
                logits = model(x, training=True)
                loss = loss_of(y, logits)
            return tape.gradient(loss, model.trainable_variables), loss, {"logits": logits}
        logits = model(x, training=True)
        loss = loss_of(y, logits)
        gradients = optimizer.get_gradients(loss, model.trainable_variables)
        return gradients, loss, {"logits": logits}

    return run, optimizer


def losses(model: Net, use_tape: bool, is_eager: bool) -> list[float]:
    run, optimizer = make_step(model, use_tape)

    def train(x, y):
        gradients, loss, outputs = run(x, y)
        reduced = [hvd.allreduce(gradient.accumulate()) for gradient in gradients]
        optimizer.apply_gradients(zip(reduced, model.trainable_variables, strict=True))
        assert outputs["logits"].merge().shape == (ROWS, CLASSES)
        assert len(loss.outputs) == 2 and loss.stack().shape == loss.concat().shape == (2,)
        return hvd.allreduce(loss.reduce_mean())

    call = train if is_eager else tf.function(train)
    x, y = (tf.constant(value) for value in rows())
    return [float(call(x, y)) for _ in range(3)]


def check_smp(folder: str, partitions: int) -> list[float]:
    """Returns the losses of three steps, and of three more after a checkpoint was loaded."""
    parameters = {"partitions": partitions, "microbatches": 2, "horovod": True}
    if partitions == 2:
        parameters |= {"auto_partition": False, "default_partition": 0}
    smp.init(parameters)
    rank, size, mp = smp.rank(), smp.size(), smp.mp_rank()
    assert smp.mp_size() == smp.pp_size() == partitions and smp.tp_size() == 1
    assert smp.dp_size() * partitions == size == hvd.size() * partitions
    assert smp.get_mp_group()[mp] == smp.get_dp_group()[smp.dp_rank()] == rank
    keras.utils.set_random_seed(3)
    model = Net()
    called = []
    smp.register_post_partition_hook(lambda: called.append(len(model.variables)))
    first = losses(model, use_tape=True, is_eager=False)
    assert called == [len(model.variables)]
    if partitions == 2:  # by hand: one block and three
        blocks = sum("batch_normalization" in v.path for v in model.trainable_variables) // 2
        assert blocks == (1 if smp.pp_rank() == 0 else 3)

    checkpoint = tf.train.Checkpoint(model=model)
    manager = smp.CheckpointManager(checkpoint, f"{folder}/checkpoints_{partitions}_{size}")
    assert manager.restore() is None and manager.latest_checkpoint is None
    assert manager.checkpoints == []
    smp.barrier()  # else another rank's save is already there
    path = manager.save()
    assert manager.checkpoints == [path] and manager.latest_checkpoint == path
    once = losses(model, use_tape=False, is_eager=True)
    assert manager.restore() == path
    again = losses(model, use_tape=False, is_eager=True)
    np.testing.assert_allclose(again, once, rtol=1e-6)
    named = manager.save(checkpoint_number=70)
    assert named.endswith("-70") and manager.checkpoints == [path, named]
    assert manager.latest_checkpoint == manager.restore() == named
    if partitions == size == 2:
        check_saved_model(model, f"{folder}/saved_model")

    @smp.step(non_split_inputs=["scale"], input_split_axes={"x": 1})
    def evaluate(x, scale):
        return model(tf.transpose(x) * scale, training=False)

    outputs = evaluate(tf.transpose(tf.constant(rows()[0])), tf.constant(1.0)).merge()
    assert outputs.shape == (ROWS, CLASSES)
    everyone = smp.allgather(float(tf.reduce_sum(outputs)), smp.CommGroup.MP_GROUP)
    np.testing.assert_allclose(everyone, everyone[0])

    check_messages(rank, size)
    check_refusals(model)
    smp.barrier()
    smp.shutdown()
    return first + once


def check_saved_model(model: Net, folder: str) -> None:
    """Rank 0 writes for as long as it takes: the others wait without a limit."""

    def limited(timeout: float) -> None:
        raise AssertionError(f"a wait of at most {timeout} s")

    engine = session().engine
    engine.barrier = limited
    model.save_model(folder)
    del engine.barrier
    assert os.path.exists(f"{folder}/saved_model.pb")


def check_messages(rank: int, size: int) -> None:
    if size == 1:
        return
    if rank == 0:
        smp.broadcast({"from": 0, "array": np.arange(2)})
        smp.send("to the last", size - 1, smp.RankType.WORLD_RANK)
    else:
        found = smp.recv_from(0)
        assert found["from"] == 0 and found["array"].tolist() == [0, 1]
        if rank == size - 1:
            assert smp.recv_from(0, smp.RankType.WORLD_RANK) == "to the last"
    smp.mp_barrier()
    smp.dp_barrier()


def check_refusals(model: Net) -> None:
    with pytest.raises(UserError, match="can be called inside a function of"):
        model(tf.zeros([2, 5]))
    with pytest.raises(UserError, match="fit isn't served"):
        model.fit(None)
    with pytest.raises(AttributeError, match=r"smp.tp_register was for PyTorch.*--tensor_parallel"):
        smp.tp_register  # noqa: B018

    @smp.step
    def odd(x):
        return model(x)

    with pytest.raises(UserError, match=r"argument x has 7 rows, .*\(7 = 2 x 3 \+ 1\)"):
        odd(tf.zeros([7, 5]))

    class Headless(smp.DistributedModel):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.blocks = keras.layers.Dense(WIDTH), [keras.layers.Dense(WIDTH)] * 4

    broken = Headless()

    @smp.step
    def step(x):
        return broken(x)

    with pytest.raises(UserError, match="Headless has no attribute head"):
        step(tf.zeros([2, 5]))


if __name__ == "__main__":
    folder, num_ranks = sys.argv[1], int(os.environ.get("HOROVOD_SIZE", "1"))
    is_first = os.environ.get("HOROVOD_RANK", "0") == "0"
    if num_ranks > 1:
        check_hvd()
        check_sdp()
    saw = {"cut": check_smp(folder, 2)} if num_ranks > 1 else {}
    saw["whole"] = check_smp(folder, 1)
    print(saw, flush=True)
    if is_first:
        np.savez(f"{folder}/saw_{num_ranks}.npz", **saw)
