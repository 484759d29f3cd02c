"""A host whose own name resolves to nothing, as in many containers: ranks meet all the same."""

import os
import sys
from pathlib import Path

import pytest

from tests.distributed.launch import run

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not os.environ.get("TFBIG_SYSTEM_TESTS"), reason="make test-system runs it"),
]


def test_ranks_meet_where_the_host_name_is_unknown():
    horovodrun = Path(sys.executable).with_name("horovodrun")
    script = (
        "hostname nowhere.invalid && ! getent hosts nowhere.invalid &&"
        f" {horovodrun} -np 2 {sys.executable} -m tfbig.horovod_selftest"
    )
    done = run(["unshare", "--uts", "sh", "-c", script], timeout=120)
    assert done.returncode == 0 and "rank 1 of 2: passed" in done.stdout, done.stdout
