"""What install_horovod starts twice under horovodrun: proof that the patched Horovod works.

Apart from trainers/collectives.py the only file of the package that imports horovod.tensorflow: it
tests the engine itself, before anything of ours stands on it.
"""

import horovod.tensorflow as hvd
import tensorflow as tf


@tf.function
def summed(tensor: tf.Tensor) -> tf.Tensor:
    return hvd.allreduce(tensor, op=hvd.Sum, name="selftest_sum")


@tf.function
def result_unused(tensor: tf.Tensor) -> tf.Tensor:
    """Reduces a tensor and drops the result, which an unpatched Horovod never even sends."""
    hvd.allreduce(tensor, op=hvd.Sum, name="selftest_unused")
    return tf.size(tensor)


def main() -> None:
    """Raises unless a reduction is right and an unused one runs."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    total = summed(tf.constant([1.0, 2.0]) * (rank + 1)).numpy().tolist()
    factor = size * (size + 1) / 2
    if total != [factor, 2 * factor]:
        raise AssertionError(f"rank {rank} of {size}: the sum is {total}")
    # The ranks' shapes differ on purpose. Horovod finds that out when the collective runs, and says
    # so on both; a collective that was pruned finds out nothing.
    try:
        result_unused(tf.ones([rank + 1]))
    except tf.errors.FailedPreconditionError:
        pass
    else:
        raise AssertionError(f"rank {rank} of {size}: TensorFlow dropped an unused collective")
    print(f"rank {rank} of {size}: passed", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
