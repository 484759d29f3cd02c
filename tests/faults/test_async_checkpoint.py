"""Checkpoints written beside training: what they hold, what failing costs, when they are said."""

import os
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from tfbig import host_memory, train
from tfbig.checkpoint import list_checkpoints
from tfbig.checkpoint_format import CheckpointError, Slice
from tfbig.checkpoint_reader import CheckpointReader
from tfbig.checkpoint_writer import CheckpointWriter
from tfbig.config import replace_fields
from tfbig.loop import Progress
from tfbig.run_folder import RunFolder, read_events
from tfbig.run_state import StateKeeper
from trainers.single import SingleTrainer


class OneArray:
    """What StateKeeper asks of a trainer, with one array for a model."""

    rank, size, num_replicas = 0, 1, 1

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def state_slices(self):
        yield Slice("kernel", self.array.shape, (0,) * self.array.ndim, self.array, True)

    def broadcast(self, array):
        return array

    def agree(self, value, op):
        return value


def keeper_of(folder, array, **fields) -> StateKeeper:
    config = replace_fields(train.config_from({}), {"keep_last": 1, "keep_best": False, **fields})
    run = RunFolder(folder)
    run.create()
    return StateKeeper(config, run, OneArray(array), lambda consumed_samples: {})


@pytest.fixture
def gate(monkeypatch):
    """Holds every write of a part until it is opened."""
    opened, entered = threading.Event(), threading.Event()
    real = CheckpointWriter.save

    def save(self, *args, **kwargs):
        entered.set()
        assert opened.wait(60)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(CheckpointWriter, "save", save)
    opened.entered = entered
    yield opened
    opened.set()


def test_training_goes_on_and_the_checkpoint_holds_what_was(tmp_path, gate):
    array = np.arange(6.0)
    with keeper_of(tmp_path, array) as keeper:
        keeper.save(Progress(1, 32), {})
        assert gate.entered.wait(60)
        array += 100  # the next step's update
        assert keeper.finished() == [] and list_checkpoints(tmp_path / "checkpoints") == []
        gate.set()
        ((step, seconds),) = keeper.finished(wait=True)
        assert step == 1 and seconds > 0
        keeper.save(Progress(2, 64), {})
        keeper.finished(wait=True)
    (info,) = list_checkpoints(tmp_path / "checkpoints")  # the first one was pruned
    np.testing.assert_array_equal(CheckpointReader(info.path).read("kernel"), np.arange(6.0) + 100)


def test_the_copy_in_host_memory_holds_its_values_and_its_room():
    array = np.arange(6.0)
    copy = host_memory.HostCopy()
    seen = copy.look(OneArray(array).state_slices())
    array += 1
    (first,) = copy.take(seen)
    assert seen == []
    np.testing.assert_array_equal(first.array, np.arange(6.0))
    (second,) = copy.take(copy.look(OneArray(array).state_slices()))
    assert second.array is first.array
    np.testing.assert_array_equal(second.array, np.arange(6.0) + 1)
    replica = Slice("kernel", (6,), (0,), array, False)
    (third,) = copy.take(copy.look([replica]))
    assert third.rectangle == replica.rectangle and not third.is_writer


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_steps_that_overtake_the_copy_do_not_change_it(optimizer, tmp_path, monkeypatch):
    """The real trainer, two updates of which are made before the thread copies anything."""
    fields = {
        **{"vocab_size": 64, "max_length": 8, "sequence_length": 8, "embed_dim": 16},
        **{"num_layers": 1, "num_heads": 2, "global_batch": 2, "warmup_steps": 0},
        **{"ema_decay": 0.9, "optimizer": optimizer, "keep_best": False},
    }
    trainer = SingleTrainer(train.config_from(fields))
    trainer.build()

    def step(number: int) -> None:
        batch = {
            "tokens": tf.constant(np.arange(18).reshape(2, 9) % 64, tf.int32),
            "sample_index": tf.constant([0, 1], tf.int64),
            "source_index": tf.constant([0, 0], tf.int32),
            "loss_mask": tf.ones([2, 8], tf.uint8),
        }
        assert bool(trainer.train_step(batch, number, 0.1, 0.0, 0).applied)

    opened, real = threading.Event(), host_memory.HostCopy.take

    def late(self, seen):
        assert opened.wait(60)
        return real(self, seen)

    monkeypatch.setattr(host_memory.HostCopy, "take", late)
    step(0)
    expected = {part.path: np.array(part.array) for part in trainer.state_slices()}
    run = RunFolder(tmp_path)
    run.create()
    with StateKeeper(trainer.config, run, trainer, lambda consumed_samples: {}) as keeper:
        keeper.save(Progress(1, 2), {})
        step(1)
        step(2)
        opened.set()
        keeper.finished(wait=True)
    reader = CheckpointReader(list_checkpoints(run.checkpoints_dir)[0].path)
    assert set(reader.paths()) == set(expected)
    changed = 0
    for part in trainer.state_slices():
        np.testing.assert_array_equal(reader.read(part.path), expected[part.path])
        changed += not np.array_equal(np.asarray(part.array), expected[part.path])
    assert changed > len(expected) / 2


def test_a_failed_write_is_raised_at_the_next_step_and_the_old_checkpoint_stays(
    tmp_path, monkeypatch
):
    with keeper_of(tmp_path, np.arange(6.0)) as keeper:
        keeper.save(Progress(1, 32), {})
        assert [saved.step for saved in keeper.finished(wait=True)] == [1]

        def full(descriptor, data):
            raise OSError(28, os.strerror(28))

        monkeypatch.setattr(os, "write", full)
        keeper.save(Progress(2, 64), {})
        with pytest.raises(CheckpointError, match=r"step 2 not saved: .*No space left"):
            keeper.finished(wait=True)
        monkeypatch.undo()
        assert keeper.finished() == []
    assert [info.step for info in list_checkpoints(tmp_path / "checkpoints")] == [1]


def test_a_damaged_new_checkpoint_costs_no_old_one(tmp_path, monkeypatch):
    with keeper_of(tmp_path, np.arange(6.0)) as keeper:
        keeper.save(Progress(1, 32), {})
        keeper.finished(wait=True)
        real = CheckpointWriter.wait_until_complete

        def damage(self, step, attempt):
            real(self, step, attempt)
            (part,) = self.checkpoints_dir.glob(f"step_{step:08d}/*.safetensors")
            data = bytearray(part.read_bytes())
            data[-1] ^= 1
            part.write_bytes(data)

        monkeypatch.setattr(CheckpointWriter, "wait_until_complete", damage)
        keeper.save(Progress(2, 64), {})
        with pytest.raises(Exception, match="step_00000002 is damaged"):
            keeper.finished(wait=True)
    assert [info.step for info in list_checkpoints(tmp_path / "checkpoints")] == [1, 2]


def test_keep_every(tmp_path):
    with keeper_of(tmp_path, np.arange(6.0), keep_every=3) as keeper:
        for step in range(1, 8):
            keeper.save(Progress(step, step), {})
            keeper.finished(wait=True)
    assert [info.step for info in list_checkpoints(tmp_path / "checkpoints")] == [3, 6, 7]


def test_without_host_memory_a_save_is_complete_when_it_returns(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 50)
    with keeper_of(tmp_path, np.arange(6.0)) as keeper:
        for step in (1, 2):
            keeper.save(Progress(step, step), {})
            assert [info.step for info in list_checkpoints(tmp_path / "checkpoints")] == [step]
            assert [saved.step for saved in keeper.finished()] == [step]
    assert capsys.readouterr().out.count("training waits while this checkpoint is written") == 1


def test_the_event_comes_when_the_checkpoint_is_complete(tmp_path, small_flags, monkeypatch):
    """A slow disk: steps go on meanwhile, the final save is waited for."""
    real = CheckpointWriter.save

    def slow(self, *args, **kwargs):
        time.sleep(0.3)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(CheckpointWriter, "save", slow)
    flags = [*small_flags, f"--run_dir={tmp_path / 'run'}", "--eval_every=0", "--notensorboard"]
    assert train._body([*flags, "--steps=40", "--checkpoint_every=38"]) == 0
    events = read_events(tmp_path / "run")
    saved = [event for event in events if event["event"] == "checkpoint"]
    assert [event["step"] for event in saved] == [38, 40] and events[-1]["event"] == "stop"
    for event in saved:
        assert event["seconds"] >= 0.3
    steps = [info.step for info in list_checkpoints(tmp_path / "run" / "checkpoints")]
    assert steps == [38, 40]
