"""What an elastic run refuses, and what it carries from one world into the next."""

import os
import threading
from http.server import ThreadingHTTPServer

import numpy as np
import pytest

from tests.error_line import line_of
from tfbig import train
from tfbig.checkpoint_format import LazyArray, Slice
from tfbig.elastic.launcher import Launcher, Place
from tfbig.elastic.standing import Standing, keep, kept_files, let_go, rewrite, take
from tfbig.elastic.worlds import is_change
from tfbig.errors import RunError, UserError, WorldChanged

REFUSED = {
    "sharded": (["--strategy=horovod", "--shard_gradients"], "--shard_gradients"),
    "pipeline": (["--strategy=pipeline", "--pipeline_parallel_degree=2"], "not pipeline"),
    "single": (["--strategy=single"], "not single"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layouts_that_cannot_lose_a_rank_are_refused(name, capsys, tmp_path):
    flags, words = REFUSED[name]
    line = line_of(train.main, [*flags, "--elastic", f"--run_dir={tmp_path}/run"], capsys, "train")
    assert words in line and "tfbig launch --restarts" in line
    assert not (tmp_path / "run").exists()


def test_a_launcher_of_a_fixed_size_is_refused(capsys, tmp_path):
    flags = ["--strategy=horovod", "--elastic", f"--run_dir={tmp_path}/run"]
    line = line_of(train.main, flags, capsys, "train")
    assert "--host-discovery-script" in line


@pytest.mark.parametrize("flag", ["--verify", "--replay_step=3", "--scale_learning_rate"])
def test_options_that_fix_the_ranks_are_refused(flag, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    flags = ["--strategy=horovod", "--elastic", f"--run_dir={tmp_path}/run", flag]
    assert flag.partition("=")[0] in line_of(train.main, flags, capsys, "train")


def test_a_standing_and_its_state_are_kept(tmp_path):
    kernel = np.arange(6, dtype=np.float32).reshape(2, 3)
    slices = [
        Slice("kernel", (2, 3), (0, 0), LazyArray((2, 3), "float32", lambda: kernel), False),
        Slice("optimizer/iterations", (), (), np.array(7, np.int64), False),
    ]
    environ: dict[str, str] = {}
    assert take(environ) is None
    records = [{"step": 7, "loss": 1.5}]
    keep(Standing(step=7, consumed_samples=56, records=records), slices, environ)
    files = kept_files(environ)
    kept = take(environ)
    assert kept.standing == Standing(step=7, consumed_samples=56, records=records)
    assert np.array_equal(kept.read("kernel"), kernel)
    assert kept.read("optimizer/iterations") == 7
    assert kept.shapes["optimizer/iterations"] == ([], "int64")
    rewrite(Standing(step=7, reason="short"), environ)
    again = take(environ)
    assert again.standing.reason == "short" and np.array_equal(again.read("kernel"), kernel)
    let_go(environ)
    assert not environ and not any(os.path.exists(f"/proc/self/fd/{file}") for file in files)


def test_which_errors_change_the_world():
    assert is_change(WorldChanged("hosts were added"))
    assert is_change(RuntimeError("Horovod has been shut down"))
    assert is_change(RuntimeError("[/b/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting"))
    lost = RunError("host b no longer answers")
    lost.__cause__ = RuntimeError("HorovodAllreduce: connection reset")
    assert is_change(lost)
    assert not is_change(UserError("start them by horovodrun or Horovod"))
    assert not is_change(RunError("disk full"))


@pytest.fixture
def launchers():
    """Three ranks' view of a rendezvous server, Horovod's own."""
    from horovod.runner.http.http_server import KVStoreHandler

    server = ThreadingHTTPServer(("127.0.0.1", 0), KVStoreHandler)
    server.cache, server.cache_lock, server.verbose = {}, threading.Lock(), False
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    environ = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.server_port),
        "HOROVOD_HOSTNAME": "a",
    }
    yield [Launcher(environ | {"HOROVOD_LOCAL_RANK": str(slot)}) for slot in range(3)]
    server.shutdown()
    server.server_close()


def test_ranks_meet(launchers):
    met = []

    def come(rank: int) -> None:
        launchers[rank].meet(rank, 3, 30)
        met.append(rank)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(met) == [0, 1, 2]


def test_a_rank_that_does_not_come_is_not_waited_for(launchers):
    with pytest.raises(WorldChanged, match="rank 1, 2 did not start"):
        launchers[0].meet(0, 3, 0.3)
    with pytest.raises(WorldChanged, match="another rank"):
        launchers[1].meet(1, 3, 0.3)


def test_a_place_is_told_to_horovod():
    environ: dict[str, str] = {}
    Place(1, 3, 0, 1, 1, 3).enter_into(environ)
    assert environ["HOROVOD_RANK"] == "1" and environ["HOROVOD_CROSS_SIZE"] == "3"


def test_a_launcher_that_has_ended_is_named(launchers):
    gone = Launcher(
        {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": "1",
            "HOROVOD_HOSTNAME": "a",
            "HOROVOD_LOCAL_RANK": "0",
        }
    )
    with pytest.raises(RunError, match="the launcher has ended"):
        gone.ask_place(5)
