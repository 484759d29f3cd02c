"""Activation checkpointing: the same numbers from less memory."""

import re

import numpy as np
import pytest
import tensorflow as tf

from tests.distributed.parity_worker import local_batch, make_config
from tfbig.model.host_store import HostStore
from tfbig.model.recomputation import recomputed
from tfbig.recomputation_mode import group_size, problem
from trainers.clock import Clock
from trainers.single import SingleTrainer

DROPOUT = {"dropout": 0.2, "attention_dropout": 0.1, "embedding_dropout": 0.1}
MODES = ("block", "group_2", "attention")


def make(mode: str, **fields) -> SingleTrainer:
    fields = {"strategy": "single", "attention": "plain", "activation_checkpointing": mode} | fields
    trainer = SingleTrainer(
        make_config({"fields": fields, "model": {"num_layers": 2, **DROPOUT, "tied_head": False}})
    )
    trainer.build(num_sources=3)
    return trainer


def traced(trainer: SingleTrainer) -> tuple[dict[str, np.ndarray], tf.types.experimental.Callable]:
    """Returns a step's gradients and the graph they were made by."""

    @tf.function(autograph=False)
    def run(batch):
        return trainer._gradients(batch, tf.constant(0, tf.int64), Clock())[0]

    batch = local_batch(trainer, 0)
    gradients = {path: x.numpy() for path, x in run(batch).items()}
    return gradients, run.get_concrete_function(batch).graph


def num_softmaxes(graph: tf.Graph) -> int:
    return sum(operation.type == "Softmax" for operation in graph.get_operations())


@pytest.fixture(scope="module")
def plain():
    return traced(make("none"))


@pytest.mark.parametrize("mode", MODES)
def test_gradients_equal_and_the_forward_pass_is_made_again(plain, mode):
    expected, graph = plain
    found, graph_again = traced(make(mode))
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], value, rtol=1e-5, atol=1e-6, err_msg=path)
    assert (num_softmaxes(graph), num_softmaxes(graph_again)) == (2, 4)


def test_inputs_that_wait_on_the_host_change_nothing(plain):
    expected, _ = plain
    found, graph = traced(make("block", offload_activations=True, activation_loading_horizon=1))
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], value, rtol=1e-5, atol=1e-6, err_msg=path)
    on_host = [o for o in graph.get_operations() if o.device.endswith("CPU:0")]
    assert len(on_host) >= 2, "two blocks' inputs"


@pytest.mark.parametrize("horizon", [0, 1, 5])
def test_a_transfer_back_begins_the_horizon_before_its_use(horizon):
    @tf.function(autograph=False)
    def run(*tensors):
        store, events = HostStore(horizon), []
        for index in range(4):
            store.put(index, tensors[index])
        for index in (3, 2, 1, 0):
            after = tf.identity(tensors[4], name=f"after_{index}")
            events.append(tf.identity(store.get(index, after), name=f"got_{index}"))
        return events

    values = [tf.constant(float(index)) for index in range(5)]
    assert [float(x) for x in run(*values)] == [3, 2, 1, 0]
    graph = run.get_concrete_function(*values).graph
    for index in range(4):
        transfer = graph.get_operation_by_name(f"got_{index}").inputs[0].op
        begins = min(3, index + horizon)
        assert [o.name for o in transfer.control_inputs] == [f"after_{begins}"]


def test_backward_keeps_the_arguments_alone():
    """Between the two passes lie the arguments: the second pass waits for the upstream gradient."""

    @tf.function(autograph=False)
    def run(x, weight):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = recomputed(lambda x, weight: tf.nn.softmax(x @ weight), x, weight)
            loss = tf.reduce_sum(tf.sin(y))
        return tape.gradient(loss, x)

    graph = run.get_concrete_function(tf.ones([2, 3]), tf.ones([3, 3])).graph
    first, second = [o for o in graph.get_operations() if o.type == "Softmax"]
    readers = {
        operation.name
        for output in first.outputs
        for operation in output.consumers()
        if operation.type != "IdentityN"
    }
    assert readers <= {"Identity"}, readers
    product = second.inputs[0].op
    assert all(i.op.type == "Identity" and i.op.control_inputs for i in product.inputs)


@pytest.mark.parametrize("mode", ["", "group_", "group_0", "group_-1", "blocks", "group_1x"])
def test_other_words_are_refused(mode):
    assert re.search("none, block, group_N", problem(mode))


def test_words_and_their_group_sizes():
    modes = ("none", "block", "group_12", "attention")
    assert [group_size(mode) for mode in modes] == [0, 1, 12, 0]
