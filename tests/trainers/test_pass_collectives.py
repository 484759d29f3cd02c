"""How many all-reduces a block's passes make under tensor parallelism, with recomputation."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.distributed.parity_worker import local_batch, make_config
from tfbig.model.gpt import GPT
from tfbig.model.tensor_split import WHOLE, TensorSplit
from trainers.passes import Passes, ancestors, backward_half, tensors_kept
from trainers.pipeline_stage import Chunk
from trainers.tensor_parallel import TensorParallel

MARK, LAYERS = "Roll", 2  # an operation that the model has nowhere else


class MarkingGroup:
    """Two ranks of which one is missing: sums are rolls by nothing, which can be counted."""

    size, rank = 2, 0

    def all_reduce(self, tensor, name, op="sum", clock=None):
        return tf.roll(tensor, 0, 0)

    def all_gather(self, tensor, name, clock=None):
        return tf.concat([tensor, tensor], 0)


HALF = TensorParallel(MarkingGroup())


@functools.cache
def graphs_of(mode: str, split: TensorSplit) -> tuple[tf.Graph, tf.Graph]:
    """Returns the graphs of the forward and of the backward pass of all blocks."""
    config = make_config({"fields": {}, "model": {"num_layers": LAYERS}})
    chunk = Chunk(GPT.from_config(config.model, split=split, activation_checkpointing=mode))
    chunk.begin()

    class Replica:
        data_size, data_rank = 4, 0

    chunk.forward(None, local_batch(Replica, 0), 0, 1, tf.constant(0, tf.int64))
    (passes,) = chunk._passes.values()
    return passes.graphs


def test_no_tensor_holds_whole_logits():
    """Each rank has the logits of its part of the vocabulary alone, forward and backward."""
    vocab_size = make_config({"fields": {}, "model": {}}).model.vocab_size
    own = HALF.part(vocab_size)[1]
    half, whole = (
        {
            tensor.shape[-1]
            for graph in graphs_of("none", split)
            for operation in graph.get_operations()
            for tensor in operation.outputs
            if tensor.shape.rank
        }
        for split in (HALF, WHOLE)
    )
    assert own in half and not half & {vocab_size, 2 * own}, half
    assert vocab_size in whole, "one device's are whole"


def test_a_tensor_group_keeps_no_more_hidden_states_than_one_device():
    """Each norm's input and its scaled result; not what sums over the group were made of.

    The last norm's result enters the head, which has it flat on one device.
    """
    config = make_config({"fields": {}, "model": {"num_layers": LAYERS}})
    norms = 2 * LAYERS + 1

    def kept(split: TensorSplit) -> int:
        outputs = graphs_of("none", split)[0].outputs
        return sum(x.shape.rank == 3 and x.shape[-1] == config.model.embed_dim for x in outputs)

    assert (kept(HALF), kept(WHOLE)) == (2 * norms, 2 * norms - 1)


@functools.cache
def count(mode: str) -> tuple[int, int]:
    """Returns the all-reduces of the forward and of the backward pass."""
    forward, backward = (
        sum(operation.type == MARK for operation in graph.get_operations())
        for graph in graphs_of(mode, HALF)
    )
    return forward, backward


@pytest.mark.parametrize("mode, repeated", [("block", 1), ("group_2", 1.5)])
def test_backward_repeats_only_the_sums_that_it_reads(mode, repeated):
    """Of a group, all of the forward pass's two a block but the last one's second."""
    plain, found = count("none"), count(mode)
    assert plain[0] == found[0] and plain[0] > 2 * LAYERS
    assert found[1] - plain[1] == repeated * LAYERS


@pytest.mark.parametrize("waits", [False, True])
def test_backward_runs_no_collective_of_forward_again(waits):
    """What is kept was made from one's result, or waits for one, as where it is timed."""

    def function(x, weight):
        # Stateful, as our build's collectives are: it always runs.
        drawn = tf.random.uniform([4], seed=1)
        if not waits:
            return [tf.exp(x * weight + drawn)]
        with tf.control_dependencies([drawn]):
            x = tf.identity(x)
        return [tf.exp(x * weight)]

    spec = tf.TensorSpec([4], tf.float32)
    passes = Passes(function, [spec, spec], 2, spec)
    forward, backward = (
        [operation.type for operation in graph.get_operations()] for graph in passes.graphs
    )
    assert forward.count("RandomUniform") == 1 and "RandomUniform" not in backward
    x, weight = tf.range(4.0), tf.ones([4])
    results, kept = passes.forward([x, weight])
    gradients = passes.backward([x, weight], kept, tf.ones([4]))
    np.testing.assert_allclose(gradients[0], results[0], rtol=1e-5)
    np.testing.assert_allclose(gradients[1], results[0] * x, rtol=1e-5)


def test_a_scripts_backward_half_runs_its_own_effects_alone():
    """What must run besides a function's results, as an update of a variable, stays."""
    counted = tf.Variable(0.0)
    made = {}

    def both(x, upstream):
        made["drawn"] = tf.exp(0 * tf.random.uniform([4], seed=1))
        made["gradient"] = upstream * made["drawn"]
        with tf.control_dependencies([made["gradient"]]):
            made["effect"] = counted.assign_add(1.0).op
        return made["gradient"] + x

    spec = tf.TensorSpec([4], tf.float32)
    wrapped = tf.compat.v1.wrap_function(both, [spec, spec])
    forward = ancestors([made["drawn"].op])
    later = ancestors([made["effect"]]) - forward
    x, upstream = wrapped.graph.inputs[:2]
    kept = tensors_kept(wrapped.graph, forward, later, [x, upstream])
    assert [tensor.op.type for tensor in kept] == ["Exp"]
    inputs = [x, *kept, upstream]
    backward = backward_half(wrapped, inputs, [made["gradient"], made["effect"]])
    assert "RandomUniform" not in [one.type for one in backward.graph.get_operations()]
    found, _ = tf.function(backward, autograph=False)(tf.ones(4), tf.range(4.0), tf.fill([4], 2.0))
    np.testing.assert_array_equal(found, [0, 2, 4, 6])
    assert counted.numpy() == 1
