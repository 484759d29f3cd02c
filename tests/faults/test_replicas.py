"""A rank whose weights are no longer those of the others is found and named."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.distributed.launch import horovodrun, run, start_ranks, tf_configs
from tfbig.errors import RunError
from tfbig.replica_hook import ReplicaHook
from tfbig.run_folder import read_metrics
from trainers.replica_check import SLICE, checksum, differing_copies, minority

WORKER = "tests/faults/fault_worker.py"


@pytest.mark.distributed
def test_one_changed_bit_ends_the_run_and_is_named(tmp_path, small_flags):
    flags = [*flags_of("horovod", tmp_path, small_flags), "--gradient_reduction=buckets"]
    done = horovodrun(3, [WORKER, "flip", "1", "6", *flags], timeout=500)
    assert done.returncode != 0
    line = "step 8: rank 1 differs in transformer_blocks/0/ffn/up/bias"
    assert line in done.stdout, done.stdout
    assert "at step 4 it was" in done.stdout and "Traceback" not in done.stdout
    assert [record["step"] for record in read_metrics(tmp_path)] == list(range(1, 9))


def flags_of(strategy: str, folder, small_flags: list[str]) -> list[str]:
    flags = [f"--strategy={strategy}", f"--run_dir={folder}", "--steps=40", "--eval_every=0"]
    return [*small_flags, *flags, "--notensorboard", "--check_replicas_every=4"]


@pytest.mark.distributed
def test_a_device_whose_weights_part_is_found(tmp_path, small_flags):
    flags = [*flags_of("mirrored", tmp_path, small_flags), "--num_devices=2"]
    done = run([sys.executable, WORKER, "flip", "0", "6", *flags], timeout=500)
    assert done.returncode != 0
    line = "step 8: replicas [0, 1] differ in transformer_blocks/0/ffn/up/bias"
    assert line in done.stdout and "Traceback" not in done.stdout, done.stdout
    assert [record["step"] for record in read_metrics(tmp_path)] == list(range(1, 9))


@pytest.mark.distributed
def test_a_process_whose_weights_part_is_found(tmp_path, small_flags):
    flags = flags_of("multi_worker", tmp_path, small_flags)
    ended = start_ranks([[WORKER, "flip", "1", "6", *flags]] * 2, tf_configs(2), 500, 60)
    for process in ended:
        assert process.returncode != 0
    line = "step 8: replicas [0, 1] differ in transformer_blocks/0/ffn/up/bias"
    printed = "".join(process.stdout for process in ended)
    assert line in printed and "at step 4 it was" in printed, printed
    assert "Traceback" not in printed, printed


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


def test_copies_are_compared_by_variable():
    sums = np.array([[1, 5, 2], [1, 7, 2], [1, 5, 2]])
    assert differing_copies(["a", "b", "c"], sums) == [("b", [1])]
    assert differing_copies(["a", "b", "c"], sums[:2]) == [("b", [0, 1])]
    assert differing_copies(["a", "b", "c"], sums[:1]) == []


class Trainer:
    holder = "rank"

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
