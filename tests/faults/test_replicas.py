"""A rank whose weights are no longer those of the others is found and named."""

import numpy as np
import pytest
import tensorflow as tf

from tests.distributed.launch import horovodrun
from tfbig.errors import RunError
from tfbig.replica_hook import ReplicaHook
from tfbig.run_folder import read_metrics
from trainers.replica_check import SLICE, checksum, minority

WORKER = "tests/faults/fault_worker.py"


@pytest.mark.distributed
def test_one_changed_bit_ends_the_run_and_is_named(tmp_path, small_flags):
    flags = ["--strategy=horovod", f"--run_dir={tmp_path}", "--steps=40", "--eval_every=0"]
    flags += ["--notensorboard", "--check_replicas_every=4", "--gradient_reduction=buckets"]
    done = horovodrun(3, [WORKER, "flip", "1", "6", *small_flags, *flags], timeout=500)
    assert done.returncode != 0
    line = "step 8: rank 1 differs in transformer_blocks/0/ffn/up/bias"
    assert line in done.stdout, done.stdout
    assert "at step 4 it was" in done.stdout and "Traceback" not in done.stdout
    assert [record["step"] for record in read_metrics(tmp_path)] == list(range(1, 9))


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16, tf.float64, tf.int64])
def test_any_change_changes_the_checksum(dtype):
    values = np.arange(24).reshape(4, 6)
    variable = tf.Variable(tf.cast(values, dtype))
    first = int(checksum(variable))
    assert first == int(checksum(tf.Variable(tf.cast(values, dtype))))
    variable[2, 3].assign(tf.cast(77, dtype))
    assert int(checksum(variable)) != first
    swapped = np.roll(values, 1, axis=0)  # the same elements in other places
    assert int(checksum(tf.Variable(tf.cast(swapped, dtype)))) != first


def test_weights_longer_than_a_slice_are_summed_whole():
    values = np.zeros(2 * SLICE + 5, np.float32)
    first = int(checksum(tf.Variable(values)))
    sums = {first}
    for place in (0, SLICE - 1, SLICE, 2 * SLICE + 4):
        values[place] = 1.0
        sums.add(int(checksum(tf.Variable(values))))
        values[place] = 0.0
    assert len(sums) == 5


def test_the_rank_that_the_others_do_not_agree_with():
    assert minority(np.array([[1, 5], [1, 7], [0, 0], [1, 5]])) == [1]
    assert minority(np.array([[0, 0], [1, 5], [1, 7]])) == [1, 2], "two differ: nobody knows which"


class Trainer:
    def __init__(self) -> None:
        self.asked, self.found = 0, []

    def differing_replicas(self):
        self.asked += 1
        return self.found


def test_the_hook_asks_when_it_is_due():
    trainer = Trainer()
    hook = ReplicaHook(trainer, 3)
    for step in range(1, 8):
        hook.on_step({"step": step})
    assert trainer.asked == 2
    trainer.found = [("dense/kernel", [0, 1]), ("dense/bias", [1])]
    with pytest.raises(RunError, match=r"step 9: ranks \[0, 1\] differ in dense/kernel and 1 more"):
        hook.on_step({"step": 9})
