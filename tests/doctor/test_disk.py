"""Disks, limits and data folders."""

import os
import resource
import shutil
from types import SimpleNamespace

import pytest

from tfbig.diagnosis import disk, hashes, limits
from tfbig.shared_memory import shared_memory_warning

GIB = 1 << 30


def problems(found):
    return [f.text for f in found.findings if f.level != "fine"]


def test_room_and_speed_are_measured_and_nothing_is_left(tmp_path, monkeypatch):
    room = SimpleNamespace(free=5 * GIB, total=10 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: room)
    run = tmp_path / "not" / "made"
    found = disk.examine(str(run), "gpt2_124m", 2)
    assert "5.0 GiB free" in found.findings[0].text
    assert "a checkpoint of 1.4 GiB takes" in found.findings[1].text
    assert not list(tmp_path.iterdir())
    room.free = 4 * GIB
    assert (
        "the run's checkpoints need 4.2 GiB" in problems(disk.examine(str(run), "gpt2_124m", 2))[0]
    )


def test_doctors_of_one_number_share_a_folder(tmp_path):
    # Of two containers; what one of them has there, another must neither take nor remove.
    theirs = [tmp_path / f".tfbig-doctor-{os.getpid()}", tmp_path / ".tfbig-doctor-1"]
    for path in theirs:
        path.touch()
    assert min(disk.speed(tmp_path, 1)) > 0
    assert sorted(tmp_path.iterdir()) == sorted(theirs)


def test_a_slow_or_forbidden_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "speed", lambda folder, megabytes: (20.0, 400.0))
    assert "writes 20 MiB/s" in problems(disk.examine(str(tmp_path), "", 2))[0]

    def forbidden(folder, megabytes):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(disk, "speed", forbidden)
    assert "cannot be written: Permission denied" in problems(disk.examine(str(tmp_path), "", 2))[0]


def test_shared_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=64 << 20))
    levels = [
        disk.examine_shared_memory(ranks, gpus, tmp_path).findings[0].level
        for ranks, gpus in ((2, True), (1, True), (2, False))
    ]
    assert levels == ["problem", "warning", "warning"]
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=8 * GIB))
    assert not problems(disk.examine_shared_memory(8, True, tmp_path))
    assert "there is no" in problems(disk.examine_shared_memory(1, False, tmp_path / "shm"))[0]


def test_a_start_says_what_nccl_may_lack(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=64 << 20))
    line = shared_memory_warning(2, tmp_path)
    assert line and line.startswith(f"{tmp_path} has 64 MiB for 2 GPUs; NCCL may need 1024")
    assert shared_memory_warning(1, tmp_path) is None
    assert "has 0 MiB" in (shared_memory_warning(2, tmp_path / "none") or "")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=GIB))
    assert shared_memory_warning(8, tmp_path) is None


def limit_of(**given):
    values = {getattr(resource, f"RLIMIT_{name}"): value for name, value in given.items()}
    return lambda which: (values.get(which, resource.RLIM_INFINITY), resource.RLIM_INFINITY)


def test_limits(tmp_path):
    assert not problems(limits.examine(limit_of(), False))
    assert problems(limits.examine(limit_of(NOFILE=256), False)) == [
        "256 open files (at most unlimited)"
    ]
    assert "100 processes" in problems(limits.examine(limit_of(NPROC=100), False))[0]
    locked = limit_of(MEMLOCK=64 << 10)
    assert "64 KiB of locked memory" in problems(limits.examine(locked, True))[0]
    assert not problems(limits.examine(locked, False))
    later = tmp_path / "later"
    later.touch()
    os.utime(later, (4e9, 4e9))
    assert "the clock shows" in problems(limits.examine(limit_of(), False, later))[0]


@pytest.fixture
def folder(small_data, tmp_path):
    return shutil.copytree(small_data, tmp_path / "data")


def test_data_that_is_whole(folder):
    quick, whole = hashes.examine(str(folder), False), hashes.examine(str(folder), True)
    assert not problems(quick) and not problems(whole)
    assert quick.facts == whole.facts and len(quick.facts["tokenizer"]) == 16
    assert "every shard hashed" in whole.findings[-1].text


def test_data_that_is_not(folder):
    shard = next(folder.glob("*train.tfrecord*"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert not problems(hashes.examine(str(folder), False))
    assert "is damaged" in problems(hashes.examine(str(folder), True))[0]
    shard.write_bytes(content[:-1])
    assert (
        f"{shard.name} has {len(content) - 1} bytes"
        in problems(hashes.examine(str(folder), True))[0]
    )
    shard.unlink()
    (folder / "tokenizer.json").write_text("{}")
    lacks, changed = problems(hashes.examine(str(folder), False))
    assert f"lacks its shard {shard.name}" in lacks and "tokenizer.json has changed" in changed
    absent = hashes.examine(str(folder / "none"), False)
    assert absent.facts == {"data manifest": "absent"} and "no data folder" in problems(absent)[0]
