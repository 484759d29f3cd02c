"""A model that is cut over ranks answers as the whole one does, and all its ranks end together."""

import contextlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.distributed.launch import REPOSITORY, environment, horovodrun
from tests.serving.conftest import serving
from tfbig.serve_config import ServeConfig
from tfbig.serving.served_model import load_model

LAYOUTS = {
    "stages": ["--pipeline_parallel_degree=2"],
    "shards": ["--tensor_parallel_degree=2", "--sequence_parallel"],
    "stages of shards": ["--pipeline_parallel_degree=2", "--tensor_parallel_degree=2"],
}
ASKED = {"prompt": ["def", "import os"], "max_tokens": 12, "ignore_eos": True, "seed": 5}


def texts(address: str, **fields) -> list[str]:
    answer = httpx.post(f"{address}/v1/completions", json={**ASKED, **fields}, timeout=120)
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


@pytest.fixture(scope="module")
def whole(short_run) -> list[list[str]]:
    """What one device writes: sampled and greedy."""
    model = load_model(ServeConfig(run=short_run), {})
    with serving(model) as address:
        found = [texts(address), texts(address, temperature=0)]
    model.trainer.close()
    assert found[0] != found[1]
    return found


@contextlib.contextmanager
def served_by_ranks(
    short_run: str, layout: list[str], num_ranks: int
) -> Iterator[tuple[subprocess.Popen, str]]:
    """Gives horovodrun and the address of the server it started."""
    horovodrun = str(Path(sys.executable).with_name("horovodrun"))
    command = [horovodrun, "-np", str(num_ranks), sys.executable]
    command += ["-m", "tfbig.serve", f"--run={short_run}", "--port=0", "--num_rows=2"]
    job = subprocess.Popen(
        [*command, "--strategy=pipeline", *layout],
        cwd=REPOSITORY,
        env=environment({"TFBIG_GRACE_SECONDS": "30"}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    watch = threading.Timer(240, job.kill)
    watch.start()
    try:
        said = []
        for line in job.stdout:
            said.append(line)
            if found := re.search(r"serving \S+ at (http://127.0.0.1:\d+) ", line):
                break
        else:
            raise AssertionError("".join(said))
        yield job, found[1]
    finally:
        watch.cancel()
        children = psutil.Process(job.pid).children(recursive=True) if job.poll() is None else []
        for process in (job, *children):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        job.communicate()


@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_answer_as_one_device(layout, short_run, whole):
    num_ranks = 4 if layout == "stages of shards" else 2
    with served_by_ranks(short_run, LAYOUTS[layout], num_ranks) as (job, address):
        ranks = [
            child
            for child in psutil.Process(job.pid).children(recursive=True)
            if "tfbig.serve" in child.cmdline() and "python" in child.name()
        ]
        assert len(ranks) == num_ranks
        assert [texts(address), texts(address, temperature=0)] == whole
        asked = {**ASKED, "prompt": "def", "max_tokens": 25, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=asked, timeout=120) as stream:
            lines = stream.iter_lines()
            next(lines)
            job.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
        output = job.communicate(timeout=60)[0]
        assert '"event":"stop"' in output and "Traceback" not in output
        assert not psutil.wait_procs(ranks, timeout=10)[1], "a rank is left"


@pytest.mark.distributed
def test_a_rank_that_dies_ends_the_server(short_run):
    with served_by_ranks(short_run, LAYOUTS["stages"], 2) as (job, address):
        listeners = {
            connection.pid
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
            and connection.laddr.port == int(address.rpartition(":")[2])
        }
        other = next(
            child
            for child in psutil.Process(job.pid).children(recursive=True)
            if "tfbig.serve" in child.cmdline()
            and "python" in child.name()
            and child.pid not in listeners
        )
        other.kill()
        output = job.communicate(timeout=90)[0]
        assert job.returncode != 0 and "ends the server" in output


@pytest.mark.distributed
def test_replicas_are_refused(short_run):
    arguments = ["-m", "tfbig.serve", f"--run={short_run}", "--port=0", "--strategy=horovod"]
    done = horovodrun(2, arguments)
    assert done.returncode != 0 and "Traceback" not in done.stdout
    assert done.stdout.count("compute the same: start the server in one process") == 1
