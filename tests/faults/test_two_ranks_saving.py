"""Two ranks' checkpoints into one folder, each rank a thread: its disk, and who ends when."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tfbig import checkpoint, run_state, train
from tfbig.checkpoint import list_checkpoints
from tfbig.checkpoint_format import Slice
from tfbig.config import replace_fields
from tfbig.errors import UserError
from tfbig.loop import Progress
from tfbig.run_folder import RunFolder
from tfbig.run_state import StateKeeper

_MIB = 1 << 20


class Rank:
    """What StateKeeper asks of a trainer: half of an array, and collectives with another thread.

    Args:
      rank: 0 or 1.
      meeting: of both ranks.
      values: of both ranks.
    """

    size = num_replicas = 2

    def __init__(self, rank: int, meeting: threading.Barrier, values: list) -> None:
        self.rank, self._meeting, self._values = rank, meeting, values

    def state_slices(self):
        yield Slice("kernel", (2, _MIB), (self.rank, 0), np.ones((1, _MIB), np.uint8), True)

    def agree(self, value, op):
        values = self._everyone(value)
        return {"sum": sum, "min": min, "max": max}[op](values)

    def broadcast(self, array):
        return self._everyone(array)[0]

    def _everyone(self, value):
        self._values[self.rank] = value
        self._meeting.wait(60)
        values = list(self._values)
        self._meeting.wait(60)
        return values


@pytest.fixture
def keepers(tmp_path):
    """The StateKeepers of both ranks."""
    config = replace_fields(train.config_from({}), {"keep_last": 1, "keep_best": False})
    folder = RunFolder(tmp_path / "run")
    folder.create()
    meeting, values = threading.Barrier(2), [None, None]
    return [
        StateKeeper(config, folder, Rank(rank, meeting, values), lambda consumed_samples: {})
        for rank in (0, 1)
    ]


def on_both(keepers, action) -> list:
    with ThreadPoolExecutor(2) as pool:
        return [future.result(90) for future in [pool.submit(action, one) for one in keepers]]


def test_no_rank_goes_before_rank_0_has_deleted_what_is_old(keepers, monkeypatch):
    real, ended = run_state.prune, []

    def slow(*arguments, **options):
        time.sleep(1.0)
        real(*arguments, **options)
        ended.append(time.monotonic())

    monkeypatch.setattr(run_state, "prune", slow)

    def save(keeper) -> float:
        keeper.save(Progress(3, 18), {})
        assert [saved.step for saved in keeper.finished(wait=True)] == [3]
        return time.monotonic()

    left = on_both(keepers, save)
    assert len(ended) == 1 and min(left) >= ended[0]


@pytest.mark.parametrize("room", [2 * _MIB, 2 * _MIB - 1])
def test_the_disk_needs_room_for_the_parts_of_all_ranks(room, keepers, monkeypatch):
    real = os.statvfs

    def statvfs(path):
        margin = checkpoint._GIB // 4
        fields = {"f_bavail": room + margin, "f_frsize": 1, "f_blocks": 1 << 40}
        return type("Stat", (), fields) if "run" in str(path) else real(path)

    monkeypatch.setattr(os, "statvfs", statvfs)

    def save(keeper) -> str:
        try:
            keeper.save(Progress(3, 18), {})
        except UserError as error:
            return str(error)
        keeper.finished(wait=True)
        return ""

    said = on_both(keepers, save)
    folder = keepers[0]._folder.checkpoints_dir
    saved = [info.step for info in list_checkpoints(folder)]
    if room == 2 * _MIB:
        assert said == ["", ""] and saved == [3]
    else:  # where each rank's own part would have found room
        assert all("no room for a checkpoint" in line for line in said) and saved == []
