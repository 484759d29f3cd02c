"""The order in which an update's collectives begin, read from the graph."""

import tensorflow as tf

from tfbig.config import Config
from trainers.flat_buckets import flat_buckets
from trainers.passes import ancestors
from trainers.sharded_optimizer import ShardedOptimizer
from trainers.tensor_table import Shard

NUM_RANKS = 2


class OneOfTwo:
    """A rank of a group of two, whose sums are its own values."""

    rank, size = 0, NUM_RANKS

    def reduce_scatter(self, tensor: tf.Tensor, name: str, clock: object = None) -> tf.Tensor:
        return tf.identity(tensor[: tensor.shape[0] // NUM_RANKS], name=name)


def test_two_sums_are_under_way_at_a_time():
    paths = [f"transformer_blocks/{i}/att/qkv/kernel" for i in range(4)]
    buckets = flat_buckets(dict.fromkeys(paths, 4), [[path] for path in paths], NUM_RANKS)
    shards = {p: Shard(p, (4,), (4,), (0,), (4,), False, True, True, False) for p in paths}
    optimizer = ShardedOptimizer(Config(), {}, shards, buckets, OneOfTwo(), training=False)
    with tf.Graph().as_default() as graph:
        gradients = {path: tf.zeros([4]) for path in paths}
        optimizer.reduce(gradients)
        sums = [graph.get_operation_by_name(f"scatter_{index}") for index in range(4)]
    for index, one in enumerate(sums):
        needed = ancestors([one])
        waits = [other for other, before in enumerate(sums[:index]) if before in needed]
        # Room for a result is made when its sum is asked for: not before the one two behind is
        # there, so that two are held, nor later, so that one is summed while the next is made.
        assert waits == list(range(index % 2, index, 2))
