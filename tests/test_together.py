"""Ranks that are threads: a mistake of one is raised by all, with its words."""

import threading

import pytest

from tfbig import command
from tfbig.errors import UserError
from tfbig.together import Outcome, SharedError, on_every_rank, raise_together, together


class Rank:
    """One of several threads that agree as a trainer's ranks do."""

    def __init__(self, rank: int, size: int, values: list, barrier: threading.Barrier) -> None:
        self.rank, self.size, self._values, self._barrier = rank, size, values, barrier

    def agree(self, value: int, op: str) -> int:
        assert abs(value) < 2**62
        self._values[self.rank] = value
        self._barrier.wait(10)
        result = {"min": min, "max": max, "sum": sum}[op](self._values)
        self._barrier.wait(10)
        return result


def on_ranks(size: int, body) -> list:
    """Returns what `body` gives, or raises, on each of `size` ranks."""
    values, barrier, seen = [0] * size, threading.Barrier(size), [None] * size

    def run(rank: int) -> None:
        try:
            seen[rank] = body(Rank(rank, size, values, barrier))
        except Exception as error:
            seen[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return seen


@pytest.mark.parametrize("size", [1, 2, 3])
def test_without_a_mistake_each_rank_has_its_own_result(size):
    assert on_ranks(size, lambda rank: together(rank, lambda: rank.rank * 2)) == [
        2 * rank for rank in range(size)
    ]


@pytest.mark.parametrize("words", ["x", "seven b", "no room: Größe 7 → 8, \0 and so on" * 9])
@pytest.mark.parametrize("failing", [[0], [1], [2], [1, 2], [0, 1, 2]])
def test_all_ranks_raise_the_words_of_the_first_that_failed(failing, words):
    def act(rank: int) -> None:
        if rank in failing:
            raise UserError(f"{words}{rank}")

    seen = on_ranks(3, lambda rank: together(rank, lambda: act(rank.rank)))
    first = failing[0]
    expected = f"rank {first}: {words}{first}" if first else f"{words}0"
    assert [type(error) for error in seen] == [SharedError] * 3
    assert [str(error) for error in seen] == [expected] * 3


def test_a_very_long_line_is_cut():
    seen = on_ranks(2, lambda rank: raise_together(rank, "x" * 9999 if rank.rank else None))
    assert len({str(error) for error in seen}) == 1 and 2000 < len(str(seen[0])) < 2200


def test_other_errors_stay_what_they_are():
    with pytest.raises(KeyError):
        Outcome(lambda: {}["x"])
    with pytest.raises(UserError) as caught, on_every_rank(is_agreed=False):
        raise UserError("flags")
    assert isinstance(caught.value, SharedError) and not caught.value.is_agreed
    with pytest.raises(SharedError) as again, on_every_rank():
        raise caught.value
    assert not again.value.is_agreed


def fail(error: Exception):
    def body(arguments) -> None:
        raise error

    return body


@pytest.mark.parametrize(
    ("environment", "error", "said"),
    [
        ({}, UserError("x"), "tfbig t: error: x\n"),
        ({}, SharedError("x"), "tfbig t: error: x\n"),
        ({"HOROVOD_RANK": "1"}, UserError("x"), "tfbig t: error: rank 1: x\n"),
        ({"HOROVOD_RANK": "1"}, SharedError("x"), ""),
        ({"HOROVOD_RANK": "1"}, SharedError("x", False), "tfbig t: error: rank 1: x\n"),
        ({"SLURM_PROCID": "1"}, UserError("x"), "tfbig t: error: rank 1: x\n"),
        ({"SLURM_PROCID": "1"}, SharedError("x"), ""),
        ({"SLURM_PROCID": "1"}, SharedError("x", False), ""),
    ],
)
def test_who_says_an_error(environment, error, said, monkeypatch, capsys):
    for name in ("TF_CONFIG", "HOROVOD_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(command, "_OTHER_RANK_PATIENCE", 0.0)
    with pytest.raises(SystemExit) as stop:
        command.run_command("t", fail(error), [])
    assert stop.value.code == 2 and capsys.readouterr().err == said


def test_what_is_launched(monkeypatch):
    for name in ("TF_CONFIG", "HOROVOD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    assert not command.is_launched()
    for value, several in (
        ("{", False),
        ('{"cluster": {"worker": ["a:1"]}}', False),
        ('{"cluster": {"chief": ["a:1"], "worker": ["b:1"]}}', True),
    ):
        monkeypatch.setenv("TF_CONFIG", value)
        assert command.is_launched() == several
    monkeypatch.delenv("TF_CONFIG")
    monkeypatch.setenv("HOROVOD_SIZE", "1")
    assert not command.is_launched()
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    assert command.is_launched()
