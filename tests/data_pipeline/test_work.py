"""What processes of one preparation say to each other through files."""

import os
import subprocess
import sys
import time

import pytest

from data_pipeline import work as work_module
from data_pipeline.work import WorkFolder


def test_what_was_done_between_the_look_and_the_claim_is_not_done_again(tmp_path, monkeypatch):
    other, late = WorkFolder(tmp_path), WorkFolder(tmp_path)
    claim = late._claim

    def claim_late(item: str) -> bool:
        other.run([item], lambda _: {"by": "other"})  # all of it, after the look
        return claim(item)

    monkeypatch.setattr(late, "_claim", claim_late)

    def perform(item: str) -> dict:
        pytest.fail(f"{item} was done twice")

    assert late.run(["chunk"], perform) == [{"by": "other"}]
    assert not list((tmp_path / "work").glob("claims/*")) and not late.in_flight()


HOLD_A_CLAIM = """
import os, signal, sys
from pathlib import Path
from data_pipeline.work import WorkFolder

assert WorkFolder(Path(sys.argv[1]))._claim("chunk")
print(end="", flush=True)
os.close(1)
sys.stdin.read()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_claim_lives_as_long_as_its_process_even_before_its_parent_asks(tmp_path):
    work = WorkFolder(tmp_path)
    command = [sys.executable, "-c", HOLD_A_CLAIM, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.read()  # ends once it has claimed
        assert "chunk" in work.in_flight() and not work._claim("chunk")
        process.stdin.close()
        deadline = time.monotonic() + 30
        while work.in_flight() and time.monotonic() < deadline:  # nobody has waited for it
            time.sleep(0.05)
        assert work._claim("chunk")


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="the system names no starts")
def test_a_process_that_has_another_ones_id_does_not_wait_for_it(tmp_path):
    """As in a container that begins anew after a kill: the same host's name, the same id 1."""
    work = WorkFolder(tmp_path)
    claim = tmp_path / "work" / "claims" / "chunk"
    place, process, start = work._owner.split()
    claim.write_text(f"{place} {process} {int(start) - 1} 7")
    assert not work.in_flight()
    assert work.run(["chunk"], lambda item: {"by": "me"}) == [{"by": "me"}]
    claim.write_text(f"{place} {process} {start} 7")  # its own: it lives
    assert work.in_flight() == {"chunk": 7}


def test_ids_of_another_container_or_before_a_restart_are_judged_by_signs_of_life(tmp_path):
    work = WorkFolder(tmp_path)
    place, process, start = work._owner.split()
    host, *rest = place.split("/")
    elsewhere = ["another-host", f"{host}/00000000/{rest[-1]}" if rest else "another", f"{place}1"]
    claim = tmp_path / "work" / "claims" / "chunk"
    for other in elsewhere:
        claim.write_text(f"{other} {process} {start} 7")
        assert work.in_flight() == {"chunk": 7}
        old = time.time() - work_module._DEAD_AFTER - 1
        os.utime(claim, (old, old))
        assert not work.in_flight()
