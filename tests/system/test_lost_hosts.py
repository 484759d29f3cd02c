"""A host that is cut off: shortly, and for good, in a fixed layout and in an elastic run."""

import os
import subprocess
import sys
import time

import pytest

from tests.system.on_hosts import BIN, HOROVODRUN, LAYOUTS, TWO_HOSTS, Running
from tfbig.run_folder import read_events, read_metrics

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not os.environ.get("TFBIG_SYSTEM_TESTS"), reason="make test-system runs it"),
    pytest.mark.usefixtures("healed"),
]
PATIENCE = 90.0  # seconds from the cut until the job has ended, or goes on
NOTICED = 75.0  # seconds of these until ssh has given up, too; then the next world starts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_short_cut_is_survived_and_a_lost_host_ends_the_job_and_is_named(
    layout, tmp_path, small_flags
):
    flags = [*small_flags, *LAYOUTS[layout], "--num_layers=2"]
    job = Running(tmp_path, flags, HOROVODRUN)
    try:
        subprocess.run([TWO_HOSTS, "cut", "h2"], check=True)
        time.sleep(5)
        assert job.process.poll() is None
        subprocess.run([TWO_HOSTS, "heal", "h2"], check=True)
        job.wait_for_step(job.step() + 5)
        start = time.monotonic()
        subprocess.run([TWO_HOSTS, "cut", "h2"], check=True)
        job.process.wait(PATIENCE)
        print(f"the job ended {time.monotonic() - start:.0f} s after the cut")
    finally:
        job.close()
    assert job.process.returncode != 0
    last = job.shown.splitlines()[-10:]
    assert any("h2" in line for line in last), "\n".join(last)


# horovodrun puts hosts that its script prints into a set: its order is another one with each seed.
@pytest.mark.parametrize(("rank", "seed"), [(1, 0), (0, 2)])
def test_an_elastic_run_that_loses_a_host_goes_on_without_it_and_names_it(
    rank, seed, tmp_path, small_flags
):
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho h1:1\necho h2:1\n")
    script.chmod(0o755)
    launcher = ["env", f"PYTHONHASHSEED={seed}", str(BIN / "horovodrun"), "-np", "2"]
    launcher += ["--min-np", "1", "--max-np", "2", "--host-discovery-script", str(script)]
    launcher += ["--network-interfaces", "eth0", sys.executable]
    flags = [*small_flags, "--strategy=horovod", "--elastic"]
    start = time.monotonic()
    job = Running(tmp_path, flags, launcher)
    # A machine that is busy with other things starts the next world as slowly as the first.
    patience = max(PATIENCE, NOTICED + time.monotonic() - start)
    try:
        start = time.monotonic()
        subprocess.run([TWO_HOSTS, "cut", "h2"], check=True)
        time.sleep(5)  # what was under way
        before = job.step()
        job.wait_for_step(before + 2, patience - 5)
        seconds = time.monotonic() - start
        shown = job.shown.splitlines()
    finally:
        job.close()
    print(f"the run went on {seconds:.0f} s after the cut, of {patience:.0f}")
    lost = f"host h2 (rank {rank}) no longer answers"
    assert any(lost in line for line in shown), "\n".join(shown)
    (world,) = [event for event in read_events(job.folder) if event["event"] == "world"]
    assert (world["previous_world_size"], world["world_size"]) == (2, 1)
    assert world["step"] in (before, before + 1) and lost in str(world), world
    steps = [record["step"] for record in read_metrics(job.folder / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
