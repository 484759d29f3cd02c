"""One rank's failure ends all of them, and its error is the last thing that a rank prints."""

import pytest

from tests.distributed.launch import horovodrun, seconds_since_fault

WORKER = "tests/distributed/failure_worker.py"
PATIENCE = 90.0  # seconds from the fault to the job's end


def lines_of_ranks(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("[")]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("error", "ArithmeticError: the broken part of rank 1"),
        ("memory", "ResourceExhaustedError"),
    ],
)
def test_the_failed_ranks_error_comes_last(kind, error):
    done = horovodrun(2, [WORKER, kind], timeout=240)
    assert done.returncode != 0 and seconds_since_fault(done.stdout) < PATIENCE
    ranks = lines_of_ranks(done.stdout)
    assert "[0]<stdout>:rank 0 made step 0" in ranks
    assert not any("made step 1" in line for line in ranks)
    notice = [line for line in ranks if "rank 0 ends because another rank did" in line]
    last = max(index for index, line in enumerate(ranks) if error in line)
    assert len(notice) == 1 and ranks.index(notice[0]) < last
    # What follows is the rest of this error's message, or rank 0 being ended by the launcher.
    assert all(line.startswith("[1]<stderr>:") or "Terminated" in line for line in ranks[last:])
    assert "Process name: 1" in done.stdout, "the launcher must name the rank that failed"


@pytest.mark.distributed
def test_a_killed_rank_ends_the_others():
    done = horovodrun(2, [WORKER, "kill"], timeout=240)
    assert done.returncode != 0 and seconds_since_fault(done.stdout) < PATIENCE
    assert "rank 0 ends because another rank did" in done.stdout
    assert "Process name: 1" in done.stdout and "Exit code: 137" in done.stdout
