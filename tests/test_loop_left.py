"""A loop that a failure of the engine ends: what was made is recorded, what is owed comes first."""

import contextlib

import pytest

from tfbig import train
from tfbig.elastic.worlds import World
from tfbig.run_folder import read_events, read_metrics
from trainers.single import SingleTrainer


class Watched(World):
    """Looks at the loop as an elastic world does when its ranks are lost."""

    def __init__(self, owes_pause: bool) -> None:
        self._owes_pause = owes_pause

    @contextlib.contextmanager
    def trained_in(self, trainer, loop):
        try:
            yield self._owes_pause
        except RuntimeError:
            self.progress, self.owes_pause = loop.settle(), loop.owes_pause
            raise


def lose(monkeypatch, method: str, call: int) -> None:
    """Has a call of the trainer's method fail, counted from 0."""
    real, calls = getattr(SingleTrainer, method), []

    def fails(self, *arguments):
        calls.append(arguments)
        if len(calls) > call:
            raise RuntimeError("Horovod has been shut down")
        return real(self, *arguments)

    monkeypatch.setattr(SingleTrainer, method, fails)


def run(folder, flags, monkeypatch, owes_pause=False) -> tuple[Watched, int]:
    world = Watched(owes_pause)
    monkeypatch.setattr(train, "run_in_worlds", lambda config, run: run(config, world))
    common = ["--strategy=single", f"--run_dir={folder}", "--steps=8", "--eval_every=4"]
    with pytest.raises(SystemExit) as stop:
        train.main([*flags, *common, "--checkpoint_every=4", "--notensorboard", "--noprofile"])
    return world, stop.value.code


def test_a_step_that_was_made_is_recorded(tmp_path, small_flags, monkeypatch):
    lose(monkeypatch, "train_step", 6)
    world, code = run(tmp_path, small_flags, monkeypatch)
    assert code == 1 and world.progress == (6, 36) and not world.owes_pause
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_an_evaluation_that_was_interrupted_is_owed(tmp_path, small_flags, monkeypatch):
    lose(monkeypatch, "evaluate_step", 1)
    world, code = run(tmp_path, small_flags, monkeypatch)
    assert code == 1 and world.progress.step == 4 and world.owes_pause


def test_what_is_owed_comes_first(tmp_path, small_flags, monkeypatch):
    with monkeypatch.context() as lost:
        lose(lost, "train_step", 5)
        run(tmp_path, small_flags, lost)
    _, code = run(tmp_path, small_flags, monkeypatch, owes_pause=True)
    assert code == 0
    events = [(event["event"], event["step"]) for event in read_events(tmp_path) if "step" in event]
    again = events[events.index(("start", 4)) :]
    assert again.index(("evaluation", 4)) < again.index(("first_step", 5))


def test_a_bad_step_that_was_out_is_made_again(tmp_path, small_flags, monkeypatch):
    lose(monkeypatch, "train_step", 3)
    world, _ = run(tmp_path, [*small_flags, "--max_loss=0.001"], monkeypatch)
    assert world.progress == (2, 12)
