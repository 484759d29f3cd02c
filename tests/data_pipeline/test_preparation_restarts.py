import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from preparing import WORKER, contents, quiet, work

from data_pipeline import plan, sharding, shards, token_sources
from data_pipeline.dataset import TokenData
from data_pipeline.preparation import is_prepared, prepare
from tfbig.config import PrepareConfig
from tfbig.errors import UserError


def test_any_number_of_workers_and_kills_gives_the_same_bytes(several, tmp_path):
    said = {"one": [], "four": []}
    one = dataclasses.replace(several, data=str(tmp_path / "one"), workers=1)
    expected = contents(prepare(one, said["one"].append))
    assert len([name for name in expected if name.endswith(".idx")]) > 8
    four = dataclasses.replace(several, data=str(tmp_path / "four"), workers=4)
    assert contents(prepare(four, said["four"].append)) == expected
    hashes = [[line for line in lines if "corpus sha256" in line] for lines in said.values()]
    assert hashes[0] == hashes[1] and len(hashes[0]) == 1
    # Chunks of another size hold the same documents: only the kept stores are others.
    whole = dataclasses.replace(several, data=str(tmp_path / "whole"), chunk_bytes=1 << 30)
    shards = {name: data for name, data in expected.items() if ".tfrecord-" in name}
    found = contents(prepare(whole, quiet))
    assert shards == {name: data for name, data in found.items() if ".tfrecord-" in name}


def test_killed_at_any_file_operation_it_goes_on_and_ends_alike(several, tmp_path):
    config = dataclasses.replace(several, workers=1)
    whole = work(
        0, dataclasses.replace(config, data=str(tmp_path / "whole")), RAYON_NUM_THREADS="1"
    )
    assert whole.returncode == 0, whole.stderr
    num_places = int(whole.stdout)
    expected = contents(tmp_path / "whole")
    assert num_places > 100
    folder = tmp_path / "data"
    # One attempt after the other is killed, each later than the last.
    for place in np.linspace(1, num_places, 8).astype(int):
        killed = work(place, config)
        if killed.returncode == 0:  # what earlier attempts completed is not done again
            break
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        if not is_prepared(folder):
            with pytest.raises(UserError, match="not a complete one"):
                TokenData.open(folder)
    prepare(config, quiet)
    assert contents(folder) == expected


# Prepares, and is killed some time after it began; its helper ends with it.
KILLED_ANYWHERE = """
import os, signal, sys, time, threading
import data_pipeline.preparation as preparation
from tfbig.config import PrepareConfig

seconds, config = float(sys.argv[1]), eval(sys.argv[2])
preparation.Tokenizer.load(config.tokenizer)
threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start() if seconds else None
start = time.perf_counter()
preparation.prepare(config, say=lambda text: None)
print(time.perf_counter() - start)
os._exit(0)
"""


def test_killed_at_any_moment_it_goes_on_and_ends_alike(several, tmp_path):
    def attempt(seconds, config):
        return subprocess.run(
            [sys.executable, "-c", KILLED_ANYWHERE, str(seconds), repr(config)],
            capture_output=True,
            text=True,
            timeout=120,
        )

    whole = attempt(0, dataclasses.replace(several, data=str(tmp_path / "whole"), workers=2))
    assert whole.returncode == 0, whole.stderr
    expected, lasts = contents(tmp_path / "whole"), float(whole.stdout)
    generator = np.random.default_rng(int.from_bytes(os.urandom(4), "little"))
    kills = 0
    for round_number in range(int(os.environ.get("TFBIG_KILL_ROUNDS", "1"))):
        config = dataclasses.replace(several, data=str(tmp_path / f"{round_number}"), workers=2)
        for seconds in generator.uniform(0.01, lasts / 2, 5):
            kills += attempt(seconds, config).returncode == -signal.SIGKILL
        prepare(config, quiet)
        assert contents(tmp_path / f"{round_number}") == expected
    assert kills >= 2 * (round_number + 1)  # those that came before the end


def test_two_processes_prepare_one_folder_together(several, tmp_path):
    command = [sys.executable, "-c", WORKER, "0", repr(dataclasses.replace(several, workers=1))]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(2)]
    for process in processes:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
    one = dataclasses.replace(several, data=str(tmp_path / "one"), workers=1)
    assert contents(tmp_path / "data") == contents(prepare(one, quiet))


def test_a_folder_half_done_by_other_rules_of_cutting_ends_alike(tmp_path, data_folder):
    """The order of documents names chunks by number: of other chunks it would be wrong."""
    numbers = np.random.default_rng(0).integers(1, 200, 4000)
    end = TokenData.open(data_folder).end_of_text_id
    np.where(numbers < 20, end, 50 + numbers).astype("<u2").tofile(tmp_path / "train.bin")
    config = PrepareConfig(
        source=f"nanogpt:{tmp_path / 'train.bin'}",
        data=str(tmp_path / "data"),
        tokenizer=str(data_folder / "tokenizer.json"),
        sequence_length=16,
        chunk_bytes=4000,
        validation_fraction=0,
        workers=1,
    )
    expected = contents(prepare(dataclasses.replace(config, data=str(tmp_path / "new")), quiet))
    with pytest.MonkeyPatch.context() as earlier:
        earlier.setattr(plan, "_CUTS", 1)
        earlier.setattr(token_sources, "document_ranges", lambda item, chunk_bytes: [(0, -1)])
        earlier.setattr(sharding.ShardMaker, "__call__", lambda self, item: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(config, quiet)
    assert len(list((tmp_path / "data" / "tokens").iterdir())) == 1
    assert contents(prepare(config, quiet)) == expected


def test_what_was_being_written_is_in_the_way_of_no_other_options(prepare_config, monkeypatch):
    config = dataclasses.replace(prepare_config, workers=1)
    with monkeypatch.context() as killed:
        killed.setattr(shards.ShardWriter, "close", lambda self, source: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(config, quiet)
    assert list((Path(config.data) / "work").glob("shard-*.tmp-*"))
    assert is_prepared(prepare(dataclasses.replace(config, sequence_length=8), quiet))
